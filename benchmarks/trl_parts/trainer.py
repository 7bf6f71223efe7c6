"""Training with TRL's GRPOTrainer on the model, task, rewards and sizes of a Leeway config.

The module runs in an environment with TRL. The trainer has the fastest settings for a CPU: both cores in one process,
no KL term and therefore no reference model, the samples of a step in one batch, no checkpoints, and no logging.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from leeway.actors.tasks import Problem, load_reward, load_task
from leeway.actors.tasks.chat import PromptCodec
from leeway.actors.tasks.task import Call
from leeway.common.process import keep_freed_memory
from leeway.launch.config import Config, load_config
from leeway.launch.train import EVAL_PROBLEMS
from leeway.learner.optimizer import ADAM_BETAS

EVALUATED_AT_ONCE = 256

Figures = dict[str, Any]


def train(config: str, overrides: Sequence[str], num_threads: int) -> Figures:
    """Train with TRL; return time and CPU seconds at the end of each step, and pairs of seconds and accuracy.

    Args:
        config: TOML file of Leeway, whose checkpoint exists.
        overrides: overrides of keys of the config.
        num_threads: number of compute threads.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(num_threads)
    keep_freed_memory()  # keep freed memory, like Leeway's learner
    made = load_config(Path(config), overrides)
    set_seed(made.run.seed)
    task, folder = load_task(made.task), Path(made.model.path)
    codec = PromptCodec(folder, made.task.chat, made.task.system_prompt)
    functions = [load_reward(function) for function in task.rewards]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def reward(prompts: list[str], completions: list[str], number: list[int], **columns: object) -> list[float]:
        return _rewards(functions, [task.train[each] for each in number], completions)

    class Clock(TrainerCallback):
        """Clock that pauses during evaluations between steps."""

        def __init__(self) -> None:
            self.paused_s = self.paused_cpu_s = 0.0
            self.steps_s: list[float] = []
            self.steps_cpu_s: list[float] = []
            self.accuracies: list[tuple[float, float]] = []
            """Pairs of the seconds of training and the accuracy on held-out problems at that time."""

        def on_train_begin(self, *args: object, **kwargs: object) -> None:
            self.began_s = time.perf_counter()

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            now_s, cpu_s = time.perf_counter(), time.process_time()
            self.steps_s.append(now_s - self.began_s - self.paused_s)
            self.steps_cpu_s.append(cpu_s - self.paused_cpu_s)
            if made.actors.eval_every and len(self.steps_s) % made.actors.eval_every == 0:
                problems = task.heldout[:EVAL_PROBLEMS]
                self.accuracies.append((self.steps_s[-1], _accuracy(model, codec, functions, problems, made)))
                self.paused_s += time.perf_counter() - now_s
                self.paused_cpu_s += time.process_time() - cpu_s

    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="benchmark-trl-") as output:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(output_dir=output, **_arguments(made)),
            train_dataset=_dataset(task.train),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[clock],
        )
        trainer.train()
    return {"steps_s": clock.steps_s, "steps_cpu_s": clock.steps_cpu_s, "accuracies": clock.accuracies}


def _arguments(config: Config) -> dict[str, Any]:
    """Return the arguments of TRL that correspond to a Leeway config."""
    actors, learner = config.actors, config.learner
    return {
        "per_device_train_batch_size": learner.groups_per_step * actors.group_size,
        "num_generations": actors.group_size,
        "max_completion_length": actors.max_new_tokens,
        "temperature": actors.temperature,
        "max_steps": learner.num_steps,
        "learning_rate": learner.learning_rate,
        "lr_scheduler_type": learner.lr_schedule,
        "warmup_steps": learner.warmup_steps,
        "adam_beta1": ADAM_BETAS[0],
        "adam_beta2": ADAM_BETAS[1],
        "weight_decay": 0.0,
        "max_grad_norm": learner.max_grad_norm,
        "beta": 0.0,
        "seed": config.run.seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def _dataset(problems: Sequence[Problem]) -> Any:  # noqa: ANN401 -- from a library that only TRL's environment has
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [each.text for each in problems], "number": list(range(len(problems)))})


def _rewards(functions: Sequence[Call], problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
    parts: list[Any] = [function(problems, completions) for function in functions]
    return [sum(each or 0.0 for each in own) for own in zip(*parts, strict=True)]


@torch.no_grad()
def _accuracy(
    model: Any,  # noqa: ANN401 -- Transformers
    codec: PromptCodec,
    functions: Sequence[Call],
    problems: Sequence[Problem],
    config: Config,
) -> float:
    """Return the accuracy of greedy answers on problems."""
    right = 0
    for first in range(0, len(problems), EVALUATED_AT_ONCE):
        some = problems[first : first + EVALUATED_AT_ONCE]
        ids = codec.encode([each.text for each in some])
        width = max(map(len, ids))
        pad = model.config.pad_token_id or 0
        tokens = torch.tensor([[pad] * (width - len(each)) + each for each in ids])
        mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in ids])
        model.eval()
        out = model.generate(
            input_ids=tokens, attention_mask=mask, do_sample=False, max_new_tokens=config.actors.max_new_tokens
        )
        model.train()
        answers = [codec.decode(each) for each in out[:, width:].tolist()]
        right += sum(value >= config.task.correct_at for value in _rewards(functions, some, answers))
    return right / len(problems)
