"""Off-policy PPO written out from its formulas with plain floats and loops, without code of the package."""

import math
from dataclasses import dataclass, field

from tests.unit.loss_batches import mates_of, tokens_of

VALUE_COEF, VALUE_CLIP = 0.5, 0.2


@dataclass
class Result:
    """Loss, its gradients with respect to the log-probability and value of every token, and token counts by kind."""

    loss: float
    slope_T: list[float]
    value_slope_T: list[float]
    weight_T: list[float]
    counts: dict[str, int] = field(default_factory=dict)


def limited(x):
    return max(-20.0, min(20.0, x))


def difference(one_T, other_T):
    return [a - b for a, b in zip(one_T.tolist(), other_T.tolist(), strict=True)]


def weights(inputs, proximal_T, corrections):
    """Return each token's corrected weight, whether each token is kept, and how many tokens each correction changes."""
    log_rho = [limited(x) for x in difference(proximal_T, inputs.behaviour_logprobs_T)]
    weight, kept, counts = [math.exp(x) for x in log_rho], [True] * len(log_rho), {}
    for each in corrections:
        for tokens in tokens_of(inputs):
            total = sum(log_rho[t] for t in tokens)
            for t in tokens:
                rho = math.exp(log_rho[t])
                if each.type == "token_tis":
                    changed, weight[t] = not each.floor <= rho <= each.cap, max(each.floor, min(rho, each.cap))
                elif each.type == "sequence_tis":
                    product = math.exp(limited(total))
                    changed, weight[t] = product > each.cap, min(product, each.cap)
                elif each.type == "icepop":
                    changed = not each.low <= rho <= each.high
                    kept[t] = kept[t] and not changed
                elif each.type == "geometric_mask":
                    changed = not each.low <= math.exp(total / len(tokens)) <= each.high
                    kept[t] = kept[t] and not changed
                else:
                    continue
                counts[each.type] = counts.get(each.type, 0) + changed
    return [w if keep else 0.0 for w, keep in zip(weight, kept, strict=True)], kept, counts


def proximal(config, inputs):
    """Return the log-probabilities of pi_prox by its definition."""
    if config.proximal == "draw_start":
        return inputs.proximal_logprobs_T
    if config.proximal == "behaviour":
        return inputs.behaviour_logprobs_T
    found = inputs.logprobs_T.clone()
    for t, lag in enumerate(inputs.lag_T.tolist()):
        if lag:
            found[t] = inputs.behaviour_logprobs_T[t] / lag + inputs.logprobs_T[t] * (lag - 1) / lag
    return found


def group_advantages(inputs, rewards, config):
    found = []
    for b, reward in enumerate(rewards):
        mates = range(len(rewards)) if config.baseline == "batch" else mates_of(inputs, b, config.compare)
        own = [rewards[j] for j in mates]
        mean = math.fsum(own) / len(own)
        if len(own) == 1:
            found.append(0.0)
        elif config.baseline in ("rloo", "batch"):
            found.append(reward - (math.fsum(own) - reward) / (len(own) - 1))
        else:
            std = math.sqrt(math.fsum((r - mean) ** 2 for r in own) / (len(own) - 1))
            found.append((reward - mean) / (std + 1e-6) if config.baseline == "grpo" else reward - mean)
    return found


def gae_by_definition(rewards, values, lam):
    """Return A_t = sum over l of lam^l delta_{t+l}, delta_t = r_t + V_{t+1} - V_t; the last V is 0."""
    after = [*values, 0.0][1:]
    error = [r + v - u for r, v, u in zip(rewards, after, values, strict=True)]
    return [sum(lam ** (i - t) * error[i] for i in range(t, len(error))) for t in range(len(error))]


def advantages(inputs, proximal_T, config):
    """Return the advantage of every token."""
    rewards = inputs.rewards_B.tolist()
    found, penalty = [0.0] * len(proximal_T), [0.0] * len(proximal_T)
    if config.kl_beta > 0 and config.kl_in == "reward":
        penalty = [config.kl_beta * x for x in difference(proximal_T, inputs.reference_logprobs_T)]
    if config.baseline in ("value_head", "critic"):
        for b, tokens in enumerate(tokens_of(inputs)):
            own = [-penalty[t] + (rewards[b] if t == tokens[-1] else 0.0) for t in tokens]
            values = [float(inputs.old_values_T[t]) for t in tokens]
            for t, advantage in zip(tokens, gae_by_definition(own, values, config.gae_lambda), strict=True):
                found[t] = advantage
        return found
    shaped = [r - sum(penalty[t] for t in tokens) for r, tokens in zip(rewards, tokens_of(inputs), strict=True)]
    by_sequence = group_advantages(inputs, shaped, config)
    return [by_sequence[b] for b in inputs.sequence_T.tolist()]


@dataclass
class Term:
    """Objective of one token, its derivative with respect to log u, and whether a bound clips the policy ratio u."""

    objective: float
    slope: float
    low: bool = False
    high: bool = False


def clipped(config, u, a, logprob):
    """Return the term of a clipped surrogate at ratio u."""
    named = [each for each in config.corrections if each.type in ("sequence_clip", "gspo", "cispo")]
    bounds = named[0] if named else config
    if named and named[0].type == "cispo":
        weight = min(max(u, bounds.low), bounds.high)
        return Term(weight * a * logprob, weight * a, u < bounds.low, u > bounds.high)
    low, high = 1 - bounds.clip_low, 1 + bounds.clip_high
    if (a > 0 and u > high) or (a < 0 and u < low):
        return Term((high if a > 0 else low) * a, 0.0, low=a < 0, high=a > 0)
    return Term(u * a, u * a)


def share(config, inputs, tokens):
    """Return the weight of each token of a sequence in the mean."""
    if config.mean_over == "tokens":
        return 1 / inputs.logprobs_T.numel()
    return 1 / inputs.num_sequences / (len(tokens) if config.mean_over == "sequences" else config.mean_over)


def ppo(config, inputs) -> Result:
    """Return the loss with gradients that are derived by hand."""
    num_tokens = inputs.logprobs_T.numel()
    proximal_T = proximal(config, inputs)
    named = next((each for each in config.corrections if each.type in SURROGATES), None)
    kind = named.type if named else "clip"
    weight, kept, counts = weights(inputs, proximal_T, config.corrections)
    counts |= {"low": 0, "high": 0}
    advantage = advantages(inputs, proximal_T, config)
    result = Result(0.0, [0.0] * num_tokens, [0.0] * num_tokens, list(weight), counts)
    log_u = difference(inputs.logprobs_T, proximal_T)
    for tokens in tokens_of(inputs):
        # each of L tokens has 1 / L of the sequence's objective; share() includes 1 / L if mean_over = "sequences"
        per_sequence = len(tokens) if kind == "sequence_clip" and config.mean_over != "sequences" else 1
        for t in tokens:
            a, total = advantage[t], sum(log_u[i] for i in tokens)
            log_ratio = {"sequence_clip": total, "gspo": total / len(tokens)}.get(kind, log_u[t])
            term = clipped(config, math.exp(limited(log_ratio)), a, float(inputs.logprobs_T[t]))
            result.counts["low"] += kept[t] and term.low
            result.counts["high"] += kept[t] and term.high
            counted = weight[t] * share(config, inputs, tokens)
            result.loss -= counted * term.objective / per_sequence
            # the ratio of a sequence depends on all its tokens: d prod u / dlogp = prod u, d exp(mean) = exp(mean) / L
            for other in tokens if kind in ("gspo", "sequence_clip") else [t]:
                part = 1 / len(tokens) if kind == "gspo" else 1 / per_sequence
                result.slope_T[other] -= counted * term.slope * part
            add_penalties(config, inputs, t, share(config, inputs, tokens), weight[t], result)
    if config.baseline in ("value_head", "critic"):
        add_value_loss(config, inputs, advantage, result)
    return result


SURROGATES = ("sequence_clip", "gspo", "cispo")


def add_penalties(config, inputs, t, share, weight, result):
    """Add the entropy and KL terms of a token to the loss."""
    logprob = float(inputs.logprobs_T[t])
    terms = [(config.entropy_coef * weight, logprob**2 / 2, logprob)]
    if config.kl_beta > 0 and config.kl_in in ("loss", "loss_k3"):
        x = logprob - float(inputs.reference_logprobs_T[t])
        k2, k3 = (x * x / 2, x), (math.exp(-x) - 1 + x, 1 - math.exp(-x))
        terms.append((config.kl_beta * weight, *(k2 if config.kl_in == "loss" else k3)))
    for factor, value, slope in terms:
        result.loss += share * factor * value
        result.slope_T[t] += share * factor * slope


def add_value_loss(config, inputs, advantage, result):
    scale = VALUE_COEF / len(advantage)
    result.counts["value"] = 0
    for t, (value, old) in enumerate(zip(inputs.values_T.tolist(), inputs.old_values_T.tolist(), strict=True)):
        target = advantage[t] + old
        error, slope = (value - target) ** 2 / 2, value - target
        if abs(value - old) > VALUE_CLIP:
            held = old + math.copysign(VALUE_CLIP, value - old)
            if (held - target) ** 2 / 2 > error:
                error, slope = (held - target) ** 2 / 2, 0.0
                result.counts["value"] += 1
        result.loss += scale * error
        result.value_slope_T[t] += scale * slope
