"""Registry of the metrics in metrics.jsonl, actors.jsonl and eval.jsonl.

A metric that does not apply to a step is null in the row of this step, never 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

POOL_PREFIX = "pool/"
"""Prefix of metrics per pool; the registry has NAME in place of the pool's name."""
PART_PREFIX = "reward/part/"
"""Prefix of metrics per reward function; the registry has NAME in place of the function's name."""

OF_ACTORS = ("perf/generated_tokens_per_s", "overlap/frac", "time/weight_pause", "time/wait_for_policy")
"""Metrics of the actors outside the groups `actors/`, `weights/` and `pool/`."""

METRICS: dict[str, str] = {
    # the step
    "step": "Step number from 1; skipped steps count.",
    "restarts": "Number of learner restarts and resumes.",
    "version": "Policy version after the step: total updates (optimizer steps).",
    "skipped": "True if the step applied no update: no sample, or a non-finite loss or gradient.",
    "updates/taken": "Number of applied updates. Per-update metrics are means over these updates (all updates if none "
    "was applied), weighted by completion tokens.",
    "updates/skipped": "Number of updates with a non-finite loss or gradient.",
    "started_s": "Arrival time of the batch, Unix seconds.",
    "finished_s": "End time of the update, Unix seconds.",
    "loss": "Loss over the whole batch of an update.",
    "grad_norm": "Gradient norm over all stages before clipping; tied weights count once.",
    "critic/grad_norm": "grad_norm of the critic model or value head.",
    "lr": "Learning rate of the policy, after scaling.",
    "brake/lr_scale": "Factor by which lag control scaled the learning rate.",
    "brake/masked_frac": "Fraction of tokens that lag control masked.",
    # reward and length
    "reward/mean": "Mean of the step's rewards.",
    "reward/part/NAME": "Mean of reward function NAME over the step's samples to which NAME applies. Absent "
    "with a single function; at most 16 functions have this metric.",
    "reward/NAME": "Mean of the values that reward functions logged as NAME; at most 16 names.",
    "reward/std": "Standard deviation of the step's rewards.",
    "reward/max": "Maximum of the step's rewards.",
    "length/trained_mean": "Mean completion length in the step, in tokens.",
    "length/cut_frac": "Fraction of the step's completions that reached the length limit.",
    "length/fidelity_ks": "Kolmogorov-Smirnov distance between completion lengths in training and generation; 0 if "
    "equal; above 0.2, an alert starts.",
    "length/p95_ratio": "95th percentile of completion lengths in training divided by that in "
    "generation; below 1, training lacks long answers.",
    "length/covered": "Fraction of groups whose longest completion was within the buffer's prediction; the target is "
    "0.9. 0 without predictions (one pool with ample cache).",
    "length/predicted": "Fraction of the variance of prompts' mean log lengths that predictions explain; 0 until "
    "prompts repeat.",
    "length/late": "Fraction of groups predicted to miss the staleness deadline on the slowest pool; 0 with one pool.",
    # staleness: u is the version that sampled a token, v the version that trains on it
    "lag/token_mean": "Mean lag v - u of the step's tokens: version u sampled a token, version v trains on it.",
    "lag/token_p50": "Median token lag.",
    "lag/token_p95": "95th percentile of token lags.",
    "lag/token_max": "Maximum token lag; never above weight_sync.max_lag.",
    "lag/allowed": "Maximum lag at which lag control leases new groups; at most weight_sync.max_lag.",
    "lag/drift": "mean |log pi - log mu| over the tokens of an update; lag control keeps it below 0.25 over the root "
    "of the answer length. Null if a token has no log mu.",
    "lag/in_flight": "Mean version difference between the first and last token of a trajectory.",
    "lag/in_queue": "Mean version difference between the last token of a trajectory and its update.",
    "lag/publish": "Versions by which the newest published weights trail the learner at the step's start; null "
    "before the first publication.",
    "lag/wall_s": "Mean seconds from the last token of a trajectory to its step.",
    "lag/abandoned": "Number of tokens from recorded samples, or from versions that a restart discarded.",
    # the behaviour policy mu compared with the learner's policy pi
    "mismatch/k1": "mean(log mu - log pi) over the step's tokens, with pi of the step's start: effect of staleness "
    "and implementation differences.",
    "mismatch/k3": "mean(rho - 1 - log rho) with rho = pi/mu.",
    "mismatch/lag0_abs": "mean |log mu - log pi| over tokens of lag 0, in trajectories of one version that no restart "
    "discarded: the difference between engine and learner.",
    "mismatch/lag0_k3": "mismatch/k3 over the tokens of mismatch/lag0_abs.",
    "mismatch/lag0_tokens": "Number of tokens in mismatch/lag0_abs.",
    "off_policy/chi2": "Chi-squared divergence mean(rho^2) - 1, rho = pi/mu.",
    "off_policy/ess_token": "Effective sample size over tokens as a fraction: 1 / mean((w / mean w)^2), w = rho.",
    "off_policy/ess_sequence": "off_policy/ess_token over sequences; w is the product of rho.",
    "off_policy/ess_token_truncated": "ess_token of the weights that the loss applied.",
    "off_policy/ess_sequence_truncated": "ess_sequence of the mean applied weight of each sequence.",
    "off_policy/masked_frac": "Fraction of tokens with an applied weight of 0.",
    "off_policy/clip_frac_low": "Fraction of tokens for which the lower clip changes the objective; 0 for steps "
    "of one update with proximal = 'draw_start'.",
    "off_policy/clip_frac_high": "Fraction of tokens for which the upper clip changes the objective.",
    "off_policy/token_tis_frac": "Fraction of tokens with a weight bounded by token_tis.",
    "off_policy/sequence_tis_frac": "Fraction of tokens with a weight truncated by sequence_tis.",
    "off_policy/icepop_frac": "Fraction of tokens that icepop masked.",
    "off_policy/geometric_mask_frac": "Fraction of tokens that geometric_mask masked.",
    # the policy at the start of the step, in nats per token
    "policy/nll": "mean(-log pi) over the step's tokens.",
    "policy/entropy": "Entropy of the policy: mean of -log pi, weighted by rho = pi/mu over its mean.",
    "policy/kl_reference": "KL to the reference or teacher: mean of log pi - log pi_ref with the weights of "
    "policy/entropy. Null without a reference.",
    # the algorithms
    "tb/beta": "beta of trajectory balance at this step.",
    "tb/delta_abs": "Mean |delta| of trajectory balance.",
    "tb/log_z": "Mean VarGrad estimate of log Z.",
    "oapl/delta_abs": "Mean |delta| / beta, nats: distance from the batch's optimum.",
    "oapl/value": "Mean of V, which OAPL subtracts from rewards.",
    "oapl/kl_behaviour": "mean(log pi - log mu) per sequence.",
    "distillation/far_frac": "Fraction of tokens with a log ratio to the teacher beyond 10 nats.",
    "dpo/accuracy": "Fraction of pairs whose better sample has the greater implicit reward.",
    "dpo/margin": "Mean difference of implicit rewards per pair.",
    "dpo/tied_frac": "Fraction of groups without a pair because all rewards are equal.",
    "dpo/cross_frac": "Fraction of pairs between two groups of a prompt, mostly of different versions.",
    "ppo/advantage_abs": "Mean |advantage| over tokens.",
    "ppo/value_loss": "Half the mean squared error of the critic's clipped values.",
    "ppo/value_clip_frac": "Fraction of tokens for which clipping changes the value loss.",
    "ppo/explained_variance": "Fraction of the returns' variance that the critic explains at the step's start.",
    # the batch
    "batch/trajectories": "Samples in the step.",
    "batch/groups": "Groups in the step.",
    "batch/tokens": "Prompt and completion tokens in the step.",
    "batch/completion_tokens": "Completion tokens in the step.",
    "batch/micro_batches": "Packed micro-batches of the step, per replica.",
    "batch/empty_micro_batches": "Micro-batches without a sequence, over all replicas.",
    "batch/pack_efficiency": "batch/tokens divided by the capacity of all micro-batches.",
    "batch/shared_frac": "Fraction of batch/tokens not computed, because samples of a micro-batch share a prompt.",
    "batch/cost_balance": "Mean computed cost of the replicas divided by the maximum; 1 if equal.",
    # the ledger, counted in samples since the start of the run, when the step's batch was drawn
    "buffer/issued": "Leased samples, counted once per lease.",
    "buffer/in_flight": "Leased samples not yet committed, failed or requeued.",
    "buffer/committed": "Samples written to disk.",
    "buffer/failed": "Samples without a result; the failure rate is buffer/failed divided by buffer/issued.",
    "buffer/failed_reward": "Samples whose reward function failed.",
    "buffer/failed_generation": "Samples that failed or timed out in the engine.",
    "buffer/failed_quarantined": "Samples with a result that failed validation.",
    "buffer/failed_lease": "Samples with an expired lease or restarted actor, and failures after the first 64 reasons.",
    "buffer/requeued": "Unfinished samples of an actor that exited or is too slow, issued again with their tokens.",
    "buffer/waiting": "Committed samples not yet drawn.",
    "buffer/drawn": "Samples drawn for an unfinished step.",
    "buffer/trained": "Samples used by a finished step that applied an update.",
    "buffer/trained_uninformative": "Samples of buffer/trained in groups with equal rewards.",
    "buffer/dropped_stale": "Samples of groups dropped because they would exceed max_lag.",
    "buffer/filtered": "Samples without a reward, or in an unused group or step.",
    "buffer/filtered_too_long": "Filtered samples longer than a lowered learner.token_budget, and other samples of "
    "groups that became too small.",
    "buffer/uninformative": "Samples of groups with equal rewards that buffer.refill_uninformative set aside.",
    "buffer/evicted_unused": "Samples removed before they were used.",
    "buffer/quarantined": "Rows and messages that failed validation, by reason in `status.json`.",
    "buffer/duplicate": "Samples acknowledged again; excluded from the ledger.",
    "buffer/late": "Samples that arrived after their lease; excluded from the ledger.",
    "buffer/ledger_gap": "Samples that violate the ledger's identities; a value other than 0 is a bug.",
    # replay, as of the draw of the step's batch
    "buffer/effective_uses": "Total uses of samples by steps; a step repeated after a restart counts once.",
    "buffer/uses_per_sample": "buffer/effective_uses divided by buffer/trained.",
    "buffer/age_at_use": "Mean version difference between a group's oldest token and the step that draws it.",
    "buffer/on_policy_share": "Fraction of the step's tokens sampled by the version at its start.",
    "buffer/uninformative_frac": "Fraction of the step's groups with equal rewards.",
    # time, and waits
    "time/wait_for_batch": "Seconds that the learner waited for the batch.",
    "time/step": "Seconds from arrival of the batch to the end of the update.",
    "time/reference": "Seconds of scoring with the reference model.",
    "time/forward": "Seconds of forward-only passes over the batch and pass 1 of the updates.",
    "time/loss": "Seconds of evaluating the loss.",
    "time/backward": "Seconds of pass 2 of the updates (forward and backward).",
    "time/optimizer": "Seconds of gradient clipping and update.",
    "time/publish": "Seconds of copying weights for publication.",
    "time/weight_pause": "Mean seconds that a weight update paused generation, since the last row.",
    "perf/learner_tokens_per_s": "batch/tokens divided by time/step.",
    "perf/trained_tokens_per_s": "Completion tokens divided by the sum of time/step and time/wait_for_batch.",
    "perf/generated_tokens_per_s": "Completion tokens of all actors per second of wall time.",
    "time/wait_for_policy": "Mean seconds that an actor waited for weights since the last row.",
    "actors/running_samples": "Samples in flight in all actors.",
    "actors/waiting": "Actors waiting for a lease, weights or an evaluation.",
    # per pool of actors, as of the poll that returned the row
    "pool/NAME/actors": "Working actors of the pool.",
    "pool/NAME/tokens_per_s": "Completion tokens per second, over the last seconds.",
    "pool/NAME/lag_mean": "lag/token_mean over the tokens that the pool sampled.",
    "pool/NAME/mismatch_lag0_abs": "mismatch/lag0_abs over the tokens that the pool sampled.",
    "pool/NAME/slots_used": "Mean fraction of sample slots in use. An engine has max_running_samples slots, or "
    "fewer if its cache is too small.",
    "pool/NAME/step_ms": "Mean milliseconds per engine step, over the last seconds.",
    "pool/NAME/queued_ms": "Mean milliseconds that a sample waits in its engine for its first step.",
    "pool/NAME/kv_usage": "Fraction of the KV cache in use, in the pool's fullest engine.",
    "pool/NAME/preempted": "Total preemptions: samples evicted from the KV cache and computed again.",
    "pool/NAME/tokens_lost": "Total tokens discarded in samples that lost their lease or could not be requeued; "
    "excludes tokens of killed actors.",
    # transfer of weights, as of the poll that returned the row
    "weights/published": "Newest published version.",
    "weights/behind": "Versions by which the most outdated engine trails the newest published version.",
    "weights/refused": "Actors that refused their last update and keep an older version.",
    "overlap/frac": "Fraction of total step time in which an actor generated.",
    # evaluation
    "eval/accuracy_greedy": "Held-out accuracy with greedy decoding.",
    "eval/accuracy_sampled": "Held-out accuracy at temperature 1, one sample per problem.",
    "eval/num_problems": "Number of held-out problems.",
    "eval/num_failed": "Answers without a score; excluded from the accuracy.",
    "eval/policy_version": "Evaluated policy version; the newest if versions differed between actors.",
    "eval/start": "Number of learner restarts and resumes before the version was created.",
}


def is_of_actors(name: str) -> bool:
    """Return whether a metric is in actors.jsonl, which the launcher writes; all other metrics are in metrics.jsonl."""
    return name in OF_ACTORS or name.startswith(("actors/", "weights/", POOL_PREFIX))


def labelled(name: str) -> tuple[str, str, str]:
    """Return the name of a metric in the registry, and the label ("pool", "function" or "") and value of NAME."""
    if name.startswith(POOL_PREFIX):
        pool, _, what = name.removeprefix(POOL_PREFIX).rpartition("/")
        return f"{POOL_PREFIX}NAME/{what}", "pool", pool
    if name.startswith(PART_PREFIX):
        return f"{PART_PREFIX}NAME", "function", name.removeprefix(PART_PREFIX)
    return name, "", ""


class Rows:
    """Reads a file of JSON lines while another process appends to it; an incomplete last line is read later."""

    def __init__(self, path: Path, *, at_end: bool = False) -> None:
        """Start at the first line, or with `at_end` after the last line."""
        self._path, self._offset = path, 0
        if at_end:
            with path.open("rb") as file:
                self._offset = file.seek(0, os.SEEK_END)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the rows appended since the last call; yield none if the file does not exist.

        Raises:
            ValueError: a line is not JSON.
        """
        if not self._path.exists():
            return
        with self._path.open("rb") as file:  # open the file again, so that NFS loads the newest rows of other hosts
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{self._path} has a line that is not JSON: {error}; remove that line") from None


def cut_torn_line(path: Path) -> int:
    """Truncate a last line that a crash left incomplete; return the size of the file in bytes."""
    if not path.is_file():  # the file is missing or a device
        return 0
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - 2**20))
        return file.truncate(start + file.read().rfind(b"\n") + 1)
