"""The registry of metrics, and the files that hold them: metrics.jsonl and actors.jsonl.

A metric that does not apply to a step is null there, never 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

POOL_PREFIX = "pool/"
"""Before the name of a pool, for which the registry has NAME."""
PART_PREFIX = "reward/part/"
"""Before the name of a reward function, likewise."""

OF_ACTORS = ("perf/generated_tokens_per_s", "overlap/frac", "time/weight_pause", "time/wait_for_policy")
"""Metrics of the actors outside the groups `actors/`, `weights/` and `pool/`."""

METRICS: dict[str, str] = {
    # the step
    "step": "Steps, counted from 1: each trains one draw, in one or several updates. A skipped step counts here.",
    "restarts": "Start of the learner that took the step: 0, and one more after each restart or resume.",
    "version": "Policy version after the step: updates (optimizer steps) taken.",
    "skipped": "True where no update of the step was taken: its loss or gradient was not finite, or all were dropped.",
    "updates/taken": "Updates of the step that were taken; each makes a policy version. What a step reports of its "
    "updates is the mean over these, weighted by completion tokens (over all, where none was taken).",
    "updates/skipped": "Updates of the step that were not taken, because loss or gradient was not finite.",
    "started_s": "Wall time at which the step's batch was there, seconds since the Unix epoch.",
    "finished_s": "Wall time at which the update was done, seconds since the Unix epoch.",
    "loss": "Value of the algorithm's loss on the whole of an update's batch.",
    "grad_norm": "Gradient norm over all stages before clipping; tied weights count once.",
    "critic/grad_norm": "The same of a critic: a model of its own, or the value head.",
    "lr": "Learning rate of the policy, after scaling.",
    "brake/lr_scale": "Factor of the learning rate by which lag control held the update back; null where it is off.",
    "brake/masked_frac": "Share of the tokens that lag control did not let the update push further from the policy "
    "that sampled them; null where it is off.",
    # reward and length
    "reward/mean": "Mean reward of the trained samples.",
    "reward/part/NAME": "Mean of what the reward function NAME gave to those of them that it applies to. Only where a "
    "task sums several; of more than 16 the first.",
    "reward/std": "Standard deviation of those rewards.",
    "length/trained_mean": "Mean completion length of the trained samples, tokens.",
    "length/fidelity_ks": "Kolmogorov-Smirnov distance of the completion lengths trained from those generated: 0 "
    "is the same. What drops stale samples starves long answers; above 0.2 the run says so.",
    "length/p95_ratio": "95th percentile of the completion lengths trained over that of those generated, from buckets "
    "of half an octave: below 1 long answers are starved.",
    "length/covered": "Share of the groups whose longest completion was no longer than the buffer foretold: 0.9 is "
    "right. By it leases go to fast and slow pools (buffer.dispatch); 0 where there is one, and its cache is ample.",
    "length/foretold": "Share of the variance among prompts' mean lengths, in logarithms, that was foretold: 0 before "
    "prompts come again, at most what a group's mean tells of its prompt.",
    "length/late": "Share of the groups that the slowest pool would have been late with, as was foretold: they go to "
    "faster ones (buffer.dispatch); 0 where there is one.",
    # staleness: u is the version that sampled a token, v the version that trains it
    "lag/token_mean": "Mean of v - u over trained tokens, versions.",
    "lag/token_p50": "Median of v - u over trained tokens.",
    "lag/token_p95": "95th percentile of v - u over trained tokens.",
    "lag/token_max": "Greatest v - u of a trained token; never above weight_sync.max_lag. A token counts once for each "
    "update that trains it, with the version that the update finds.",
    "lag/allowed": "Lag up to which new groups are leased after the step, by lag control: at most weight_sync.max_lag. "
    "Null where it is off.",
    "lag/drift": "mean |log pi - log mu| over the tokens of an update; lag control keeps it below 0.14. Null where a "
    "token has no log-probability of its sampler.",
    "lag/in_flight": "Versions between first and last token of a trajectory, mean.",
    "lag/in_queue": "Versions between the last token and its update, mean.",
    "lag/publish": "Versions between the learner and the newest published weights when the step began. Null until a "
    "learner that was started has published its first.",
    "lag/wall_s": "Seconds from the last token of a trajectory to its step, mean.",
    "lag/abandoned": "Trained tokens from versions that a restart abandoned, or of recorded samples.",
    # behaviour policy against the learner
    "mismatch/k1": "mean(log mu - log pi) over the draw's tokens, pi at the start of the step; staleness and "
    "implementation together.",
    "mismatch/k3": "mean(rho - 1 - log rho) with rho = pi/mu.",
    "mismatch/lag0_abs": "mean |log mu - log pi| on tokens with u = v in trajectories of a single version that no "
    "restart abandoned: the gap between the two implementations. Null where there are no such tokens.",
    "mismatch/lag0_k3": "mismatch/k3 on those tokens.",
    "mismatch/lag0_tokens": "How many such tokens there were.",
    "off_policy/chi2": "mean(rho^2) - 1.",
    "off_policy/ess_token": "Effective sample size over tokens as a share: 1 / mean((w / mean w)^2) with w = rho.",
    "off_policy/ess_sequence": "The same over sequences, with w the product of rho.",
    "off_policy/ess_token_truncated": "ess_token of the weights that the loss applied, after corrections.",
    "off_policy/ess_sequence_truncated": "ess_sequence of those, a sequence weighing as its tokens do on average.",
    "off_policy/masked_frac": "Share of tokens whose applied weight is 0.",
    "off_policy/clip_frac_low": "Share of tokens where the lower clip changes the objective; 0 in steps of "
    "one update around the start of the draw.",
    "off_policy/clip_frac_high": "Share of tokens where the upper clip changes the objective; 0 likewise.",
    "off_policy/token_tis_frac": "Share of tokens whose weight token_tis bounded, above or below.",
    "off_policy/sequence_tis_frac": "Share of tokens whose weight sequence_tis truncated.",
    "off_policy/icepop_frac": "Share of tokens that icepop masked.",
    "off_policy/geometric_mask_frac": "Share of tokens that geometric_mask masked, sequence by sequence.",
    # the algorithms
    "tb/beta": "beta of trajectory balance at this step.",
    "tb/delta_abs": "Mean |delta| of trajectory balance.",
    "tb/log_z": "Mean VarGrad estimate of log Z.",
    "tb/kl_reference": "mean(log pi - log pi_ref) per sequence.",
    "oapl/delta_abs": "Mean |delta| / beta of OAPL, nats: distance from the draw's own optimum.",
    "oapl/value": "Mean of V, what a reward is held against in OAPL.",
    "oapl/kl_behaviour": "mean(log pi - log mu) per sequence.",
    "distillation/kl": "mean(log pi - log pi_teacher) per token, nats: an estimate of KL(pi || teacher).",
    "distillation/far_frac": "Share of tokens whose log ratio to the teacher is beyond 10 nats.",
    "dpo/accuracy": "Share of pairs whose better sample has the greater implicit reward.",
    "dpo/margin": "Mean difference of implicit rewards.",
    "dpo/tied_frac": "Share of groups without a pair, because all rewards were equal.",
    "dpo/cross_frac": "Share of pairs between two groups of a prompt, so mostly between two policy versions.",
    "ppo/advantage_abs": "Mean |advantage| over tokens.",
    "ppo/entropy": "Mean of -log pi over tokens, weighed by pi_prox / mu: an estimate of the entropy per token, nats.",
    "ppo/kl_reference": "mean(log pi_prox - log pi_ref) per sequence.",
    "ppo/value_loss": "Half the squared error of the critic's values, clipped, per token.",
    "ppo/value_clip_frac": "Share of tokens where clipping changes the value loss.",
    "ppo/explained_variance": "Share of the variance of returns that the critic's values at the start of the step "
    "explain; null where returns do not vary.",
    # the batch
    "batch/trajectories": "Samples in the step.",
    "batch/groups": "Groups in the step.",
    "batch/tokens": "Prompt and completion tokens in the step.",
    "batch/completion_tokens": "Completion tokens in the step.",
    "batch/micro_batches": "Packed micro-batches of the whole draw, for each replica of the pipeline.",
    "batch/empty_micro_batches": "How many of them, of all replicas, have no sequence: replicas run equally many, and "
    "the schedule asks for a least number.",
    "batch/pack_efficiency": "Real tokens over the tokens that all micro-batches have room for. Padding is not "
    "computed; it costs traffic between stages.",
    "batch/shared_frac": "Share of batch/tokens that is not computed, for another sample in its micro-batch has the "
    "same prompt.",
    "batch/cost_balance": "Mean computed cost of the replicas over that of the dearest, for which the others wait: 1 "
    "is even.",
    # the ledger, counted in samples since the start of the run, as the step's batch was drawn
    "buffer/issued": "Samples leased; a sample leased again counts again.",
    "buffer/in_flight": "Leased, neither committed nor failed nor handed on.",
    "buffer/committed": "On disk.",
    "buffer/failed": "Samples that will not come: their generation or reward failed, what came was quarantined, "
    "or their lease was lost. Over buffer/issued it is their share of the samples asked for.",
    "buffer/failed_reward": "Of the failed: a reward function failed.",
    "buffer/failed_generation": "Of the failed: the engine failed, or took too long.",
    "buffer/failed_quarantined": "Of the failed: what the actor handed in failed validation.",
    "buffer/failed_lease": "Of the failed: the lease was lost, because it expired or its actor was started again; with "
    "what has a reason beyond the first 64.",
    "buffer/handed_on": "Left unfinished by their actor, which ended or is too slow for them, and issued again with "
    "the tokens that they had.",
    "buffer/waiting": "Committed and not drawn yet.",
    "buffer/drawn": "Drawn for a step that is not finished.",
    "buffer/trained": "Used by at least one finished step that took an update.",
    "buffer/trained_uninformative": "Of the trained, those in a group whose rewards are all equal.",
    "buffer/dropped_stale": "Dropped with their group, because it would have passed max_lag.",
    "buffer/filtered": "Without a reward, or in a group or step that was not used.",
    "buffer/filtered_too_long": "Of the filtered, those longer than learner.token_budget, with what that left alone "
    "in its group: the buffer was filled when the budget was greater.",
    "buffer/uninformative": "Set aside with their group before any step, because its rewards are all equal; see "
    "buffer.refill_uninformative.",
    "buffer/evicted_unused": "Removed before they were used.",
    "buffer/quarantined": "Rows and messages that failed validation; `status.json` counts them by reason.",
    "buffer/duplicate": "Acknowledged again; outside the ledger.",
    "buffer/late": "Committed by someone else before; outside the ledger.",
    "buffer/ledger_gap": "By how many samples the identities of the ledger are violated: 0, or a bug.",
    # replay, as the step's batch was drawn
    "buffer/effective_uses": "Samples used by steps so far, each as often as it was used; a step that a restarted "
    "learner takes again counts once.",
    "buffer/uses_per_sample": "buffer/effective_uses over buffer/trained; null before the first step.",
    "buffer/age_at_use": "Versions between the oldest token of a group and the step that draws it, mean over groups.",
    "buffer/on_policy_share": "Share of the draw's tokens that the version sampled at which the step begins.",
    "buffer/uninformative_frac": "Share of the draw's groups whose rewards are all equal: to a loss that compares the "
    "samples of a prompt they say nothing. buffer.refill_uninformative sets such groups aside.",
    # time, and who waits for whom
    "time/wait_for_batch": "Seconds that the learner waited for the step's batch.",
    "time/step": "Seconds from the batch to the update.",
    "time/reference": "Seconds spent scoring with the reference model.",
    "time/forward": "Seconds of forward-only passes: of the whole draw, and pass 1 of its updates.",
    "time/loss": "Seconds to evaluate the algorithm.",
    "time/backward": "Seconds of pass 2.",
    "time/optimizer": "Seconds of clipping and update.",
    "time/publish": "Seconds of copying weights for publication, between the updates of a step and after them.",
    "time/weight_pause": "Seconds that a weight update paused generation, mean over those since the last row.",
    "perf/learner_tokens_per_s": "batch/tokens over time/step.",
    "perf/trained_tokens_per_s": "Completion tokens that the step trained over its time and the wait for its batch.",
    "perf/generated_tokens_per_s": "Completion tokens generated per second of wall time by all actors.",
    "time/wait_for_policy": "Seconds that an actor waited for weights since the last row, mean over the actors, as far "
    "as the polls of the run see it.",
    "actors/running_samples": "Samples that all actors have in flight.",
    "actors/waiting": "Actors that waited for something (a lease, weights, an evaluation) at that poll.",
    # every pool of actors, by its name; as of the poll that brought the row
    "pool/NAME/actors": "Actors of the pool that work.",
    "pool/NAME/tokens_per_s": "Completion tokens that they generated per second, over the last seconds.",
    "pool/NAME/lag_mean": "Mean of v - u over the step's trained tokens that they sampled; null where it had none.",
    "pool/NAME/mismatch_lag0_abs": "mismatch/lag0_abs over the tokens that they sampled.",
    "pool/NAME/slots_used": "Mean share of the samples that their engines have room for: max_running_samples, or "
    "what their cache will hold.",
    "pool/NAME/step_ms": "Milliseconds that an engine takes for one token of all its samples, mean over the last "
    "seconds.",
    "pool/NAME/queued_ms": "Milliseconds that a sample waited within its engine before its first step, mean likewise.",
    "pool/NAME/kv_usage": "Share of the cache of keys and values in use in the fullest of their engines.",
    "pool/NAME/preempted": "Times, so far, that a running sample had to make room in the cache; it is computed anew.",
    "pool/NAME/tokens_lost": "Tokens, so far, that were made and then thrown away with their samples, for the lease "
    "was lost or they could not be handed on; those of actors that were killed are not counted.",
    # weights on their way, as of the poll that brought the row
    "weights/published": "Newest published version.",
    "weights/behind": "Versions that the engine furthest behind is behind it; null while no actor works.",
    "weights/refused": "Actors that refused their last update and keep an older version.",
    "overlap/frac": "Share of step time so far in which at least one actor generated.",
    # evaluation
    "eval/accuracy_greedy": "Held-out accuracy, greedy.",
    "eval/accuracy_sampled": "Held-out accuracy at temperature 1, one sample each.",
    "eval/num_problems": "Held-out problems of the evaluation.",
    "eval/num_failed": "Answers that could not be generated or scored; neither right nor wrong.",
    "eval/policy_version": "Policy version that was evaluated; the newest, if actors differed.",
    "eval/start": "Start of the learner that made it: 0, and one more after each restart or resume.",
}


def is_of_actors(name: str) -> bool:
    """Return whether a metric is in actors.jsonl, which the launcher writes; the others are in metrics.jsonl."""
    return name in OF_ACTORS or name.startswith(("actors/", "weights/", POOL_PREFIX))


def labelled(name: str) -> tuple[str, str, str]:
    """A metric's name in the registry; and what NAME is there, "pool" or "function" (else empty), and which it is."""
    if name.startswith(POOL_PREFIX):
        pool, _, what = name.removeprefix(POOL_PREFIX).rpartition("/")
        return f"{POOL_PREFIX}NAME/{what}", "pool", pool
    if name.startswith(PART_PREFIX):
        return f"{PART_PREFIX}NAME", "function", name.removeprefix(PART_PREFIX)
    return name, "", ""


class Rows:
    """Reads a file of JSON lines while another process appends to it; a line that is not whole yet is left."""

    def __init__(self, path: Path, *, at_end: bool = False) -> None:
        """Begin at the first line, or behind the last one."""
        self._path, self._offset = path, 0
        if at_end:
            with path.open("rb") as file:
                self._offset = file.seek(0, os.SEEK_END)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the rows since the last call; none until the file exists.

        Raises:
            ValueError: a line is no JSON.
        """
        if not self._path.exists():
            return
        with self._path.open("rb") as file:  # opened anew: NFS checks then what another host has written
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{self._path} has a line that is no JSON: {error}; remove that line") from None


def cut_torn_line(path: Path) -> int:
    """Cut off a last line that a crash left without an end; return the size of the file in bytes."""
    if not path.is_file():  # not there yet, or a device
        return 0
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - 2**20))
        return file.truncate(start + file.read().rfind(b"\n") + 1)
