"""Each invalid input gives one sentence that names the place, and exit status 2; no folder or process is created."""

import codecs
import json
import os
import shutil
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from leeway.launch.cli import main
from leeway.launch.config import load_config
from leeway.launch.errors import ExitStatus, Stopped
from leeway.launch.processes.ray_cluster import start_ray
from leeway.launch.processes.role_process import RunFailed
from leeway.launch.run_folder import RunIdentity
from tests.unit.made_up_run import plan

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = EXAMPLES.parent / "tests" / "world" / "demo.toml"
SMALL = ("--task.num_train", "64", "--task.num_heldout", "16")
REWARD = "def exact(completions, answer, **_):\n    return [float(a == b) for a, b in zip(completions, answer)]\n"
ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 20) for b in range(10, 20)]
TASK = {
    "type": '"file"',
    "rewards": '["reward.py:exact"]',
}
OTHERS = {
    "model": {"path": f'"{EXAMPLES / "demo_model"}"'},
    "algorithm": {"type": '"trajectory_balance"'},
    "actors": {"max_prompt_tokens": "8", "max_new_tokens": "8"},
}


class Case(NamedTuple):
    """Invalid input, and the texts that its error message contains."""

    name: str
    make: Callable[[Path], list[object]]
    """Writes files to a folder; returns the arguments of `leeway train`."""
    expected: tuple[str, ...]


def demo(*overrides: str) -> Callable[[Path], list[object]]:
    """Make the arguments that train the demo with these overrides."""
    return lambda folder: [DEMO, *overrides]


def toml(text: str | bytes) -> Callable[[Path], list[object]]:
    """Make a config with this text."""

    def make(folder: Path) -> list[object]:
        (folder / "c.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return [folder / "c.toml"]

    return make


def task(
    rows: bytes | None = None, reward: str | bytes = REWARD, file: str = "rows.jsonl", **keys: str
) -> Callable[[Path], list[object]]:
    """Make a config whose task reads a file in the folder of the config."""

    def make(folder: Path) -> list[object]:
        (folder / file).write_bytes(json_lines(ROWS) if rows is None else rows)
        (folder / "reward.py").write_bytes(reward if isinstance(reward, bytes) else reward.encode())
        sections = {"task": {**TASK, "path": f'"{file}"', **keys}, **OTHERS}
        lines = [
            line
            for section, entries in sections.items()
            for line in (f"[{section}]", *(f"{key} = {value}" for key, value in entries.items()))
        ]
        (folder / "c.toml").write_text("\n".join(lines))
        return [folder / "c.toml"]

    return make


def model(change: Callable[[Path], object]) -> Callable[[Path], list[object]]:
    """Make the arguments that train the demo with a changed copy of the demo's model."""

    def make(folder: Path) -> list[object]:
        shutil.copytree(EXAMPLES / "demo_model", folder / "model")
        change(folder / "model")
        return [DEMO, "--model.path", folder / "model", *SMALL]

    return make


def with_file(name: str, content: bytes) -> Callable[[Path], object]:
    """Replace the content of a file in the model folder."""
    return lambda folder: (folder / name).write_bytes(content)


def sets(**changes: object) -> Callable[[Path], object]:
    """Change values in config.json."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def with_eos(token: int) -> Callable[[Path], object]:
    """Change the end-of-sequence token in both files that contain this token."""

    def change(folder: Path) -> None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": token}))
        sets(eos_token_id=token)(folder)

    return change


def weights(change: Callable[[dict, bytes], tuple[dict, bytes]]) -> Callable[[Path], object]:
    """Change the header or the body of the safetensors file."""

    def rewrite(folder: Path) -> None:
        file = folder / "model.safetensors"
        content = file.read_bytes()
        (length,) = struct.unpack_from("<Q", content)
        header, body = change(json.loads(content[8 : 8 + length]), content[8 + length :])
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + body)

    return rewrite


def as_int32(header: dict, body: bytes) -> tuple[dict, bytes]:
    """Declare every tensor as 32-bit integers of the same size."""
    return {name: {**entry, "dtype": "I32"} if "dtype" in entry else entry for name, entry in header.items()}, body


def renamed(header: dict, body: bytes) -> tuple[dict, bytes]:
    return {name.replace("q_proj", "query"): entry for name, entry in header.items()}, body


def json_lines(rows: list) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def after(line: bytes, rows: int = 7) -> bytes:
    """Return a valid file of rows with `line` inserted after the first `rows` lines."""
    return json_lines(ROWS[:rows]) + b"\n" + line + b"\n" + json_lines(ROWS[rows:])


def written(path: str, content: bytes, *arguments: object) -> Callable[[Path], list[object]]:
    """Write a file, and make arguments for the demo in which {file} is replaced by the path of the file."""

    def make(folder: Path) -> list[object]:
        (folder / path).write_bytes(content)
        return [DEMO, *(str(each).replace("{file}", str(folder / path)) for each in arguments)]

    return make


GOOD = DEMO.read_text()
CORRECTION = ("--algorithm", '{type = "off_policy_ppo", corrections = [%s]}')

JUDGE = (
    *("--task.rewards", "['good']"),
    *(
        "--task.reward_models.good",
        "{type = 'judge', endpoint = 'http://127.0.0.1:9/v1', model = 'm', prompt = '{completion}'}",
    ),
)

CASES = [
    # the config file
    Case("no config", lambda folder: [folder / "c.toml"], ("c.toml: no such config file",)),
    Case("a folder as config", lambda folder: [folder], ("cannot be read: Is a directory", "TOML file")),
    Case("an empty config", toml(""), ("model is missing", "(and 2 more invalid keys)")),
    Case("binary junk", toml(bytes(range(128, 256))), ("is not UTF-8 text", "save it as UTF-8")),
    Case("UTF-16", toml(GOOD.encode("utf-16")), ("is not UTF-8 text",)),
    Case("no closing quote", toml('[model]\npath = "x\n'), ("not valid TOML: ", "line 2")),
    Case("a key twice", toml("[run]\nseed = 1\nseed = 2\n"), ("not valid TOML: Cannot overwrite a value",)),
    Case("a thousand brackets", toml("[run]\nname = " + "[" * 5000 + "]" * 5000), ("not valid TOML",)),
    Case("five thousand digits", toml("[run]\nseed = " + "9" * 5000), ("not valid TOML", "digits")),
    Case("more than 64 bits", toml("[run]\nseed = " + "9" * 30), ("c.toml: run.seed: the number has 30 digits",)),
    Case("a section that is a value", toml("model = 3\n"), ("model = 3: input should be a valid dictionary",)),
    Case("YAML", toml("model:\n  path: x\n"), ("not valid TOML",)),
    # keys
    Case("an unknown section", demo("--learnr.num_steps", "3"), ("unknown key learnr; did you mean learner?",)),
    Case("an unknown key", demo("--learner.num_stage", "2"), ("did you mean learner.num_stages?",)),
    Case("a key of another section", demo("--learner.group_size", "2"), ("did you mean actors.group_size?",)),
    Case("a key at the top", demo("--learning_rate", "1e-5"), ("did you mean learner.learning_rate?",)),
    Case("a removed key", demo("--buffer.shards", "2"), ("unknown key buffer.shards",)),
    Case("a seed in words", demo("--task.params.seed", "'three'"), ("seed = 'three' is not an integer",)),
    Case("a mistyped key at the top", demo("--learning_rte", "1e-5"), ("did you mean learner.learning_rate?",)),
    Case("a key of TRL", demo("--trainer.max_steps", "8"), ("unknown key trainer",)),
    Case("an unknown key of a pool", demo("--pools.big.gpu", "1", "--pools.big.role", "actors"), ("pools.big.gpus?",)),
    Case(
        "a pool with the name of a key",
        demo("--pools.gpus.role", "actors", "--pools.gpus.count", "0"),
        ("pools.gpus.count = 0: ",),
    ),
    Case(
        "an unknown key of a pool named like a key",
        demo("--pools.count.role", "actors", "--pools.count.dtypo", "float32"),
        ("unknown key pools.count.dtypo; did you mean pools.count.dtype?",),
    ),
    Case(
        "a key of another type of task",
        task(params="{min_terms = 2}"),
        ("unknown key task.params; task.type = 'file' has no such key; it belongs to type 'reasoning_gym'",),
    ),
    Case(
        "a key of another algorithm",
        demo("--algorithm.clip_low", "0.1"),
        ("algorithm.type = 'trajectory_balance' has no such key; it belongs to type 'off_policy_ppo'",),
    ),
    Case("an unknown algorithm", demo("--algorithm.type", "ppo"), ("algorithm.type is 'ppo'", "off_policy_ppo")),
    Case("no task type", toml(GOOD.replace('type = "reasoning_gym"', "")), ("task.type is missing: set it to",)),
    Case(
        "a correction by name",
        demo(CORRECTION[0], CORRECTION[1] % '{name = "icepop"}'),
        ("algorithm.corrections.0.type is missing: set it to one of token_tis, "),
    ),
    Case(
        "a mistyped correction",
        demo(CORRECTION[0], CORRECTION[1] % '"icepap"'),
        ("algorithm.corrections.0.type is 'icepap'", "did you mean 'icepop'?"),
    ),
    Case(
        "a knob of another correction",
        demo(CORRECTION[0], CORRECTION[1] % '{type = "icepop", cap = 2.0}'),
        ("algorithm.corrections.0.type = 'icepop' has no such key; it belongs to type 'token_tis' or 'sequence_tis'",),
    ),
    Case(
        "a mistyped knob of a judge",
        demo(*JUDGE, "--task.reward_models.good.wurst", "3"),
        ("unknown key task.reward_models.good.wurst; did you mean task.reward_models.good.worst?",),
    ),
    Case(
        "a knob of another reward model",
        demo(*JUDGE, "--task.reward_models.good.path", "x"),
        ("task.reward_models.good.type = 'judge' has no such key; it belongs to type 'classifier'",),
    ),
    Case("an unused judge", demo(*JUDGE, "--task.rewards", "[]"), ("reward_models.good has no effect",)),
    Case("an unreachable judge", demo(*JUDGE), ("http://127.0.0.1:9/v1 does not answer", "start the judge first")),
    Case("top_p", demo("--actors.top_p", "0.9"), ("actors.top_p is not supported",)),
    # values
    Case("text for a number", demo("--learner.num_steps", "many"), ("learner.num_steps = 'many': ",)),
    Case("half a step", demo("--learner.num_steps", "1.5"), ("learner.num_steps = 1.5: ",)),
    Case("no steps", demo("--learner.num_steps", "0"), ("learner.num_steps = 0: input should be greater than 0",)),
    Case("infinite temperature", demo("--actors.temperature", "inf"), ("actors.temperature = inf: ", "finite")),
    Case("infinite time", demo("--actors.reward_timeout_s", "inf"), ("actors.reward_timeout_s = inf: ", "finite")),
    Case("correct at NaN", demo("--task.correct_at", "nan"), ("task.correct_at = nan: ", "finite")),
    Case("a list for a number", demo("--learner.learning_rate", "[1]"), ("learner.learning_rate = [1]: ",)),
    Case("a seed out of range", demo("--run.seed", str(2**32)), ("run.seed = 4294967296: ",)),
    Case("a long value", demo("--run.seed", "'" + "x" * 5000 + "'"), ("(5002 characters): ",)),
    Case("no value", demo("--learner.num_steps"), ("--learner.num_steps has no value",)),
    Case("no override", demo("num_steps=3"), ("'num_steps=3' is not an override",)),
    Case("below a value", demo("--learner.num_steps.max", "3"), ("'num_steps' is a value, not a section",)),
    Case("a name with a slash", demo("--run.name", "a/b"), ("run.name = 'a/b' is not a folder name",)),
    Case("an empty name", demo("--run.name", ""), ("run.name = '' is not a folder name",)),
    Case("a name with a NUL", toml('[run]\nname = "a\\u0000b"\n'), ("run.name = 'a\\x00b': ",)),
    Case("an override in Latin-1", demo("--task.template", "{question}\udce9"), ("--task.template = ", "not UTF-8")),
    Case("an unknown home", demo("--model.path", "~no-user/x"), ("--model.path = '~no-user/x': invalid path",)),
    Case("an unknown home for runs", demo("--run.dir", "~no-user/x"), ("run.dir = '~no-user/x': ",)),
    Case("a file for runs", lambda folder: [DEMO, "--run.dir", DEMO], ("demo.toml is a file; choose a folder",)),
    # keys that contradict each other
    Case("groups of one", demo("--algorithm.type", "online_dpo", "--actors.group_size", "1"), ("at least 2",)),
    Case("more stages than layers", demo("--learner.num_stages", "9"), ("has only 2 layers",)),
    Case("too few tokens", demo("--learner.token_budget", "8"), ("raise learner.token_budget",)),
    Case("a bound that is never met", demo("--weight_sync.max_lag", "0", "--learner.num_epochs", "3"), ("never be",)),
    Case("stages on missing GPUs", demo("--learner.gpus", "1"), ("gpus of the workers add up to 2",)),
    Case("actors on missing GPUs", demo("--actors.gpus", "1"), ("pool 'actors' requests 2 x",)),
    Case("a GPU and a half", demo("--actors.gpus", "1.5"), ("pool 'actors' reserves 1.5 GPUs", "a worker uses 1")),
    Case("an idle GPU", demo("--learner.gpus", "2"), ("pool 'learner' reserves 2 GPUs", "a stage uses 1")),
    Case(
        "an overcommitted GPU",
        demo(
            *["--actors.gpus", "1", "--actors.num_actors", "1", "--learner.num_stages", "1", "--learner.gpus", "1"],
            *["--launch.colocate", "true"],
        ),
        ("add up to 1.35 of a GPU",),
    ),
    Case("more than all of a GPU", demo("--learner.gpu_memory_share", "1.5"), ("gpu_memory_share = 1.5: ",)),
    Case(
        "an argument unknown to vLLM",
        demo("--actors.engine_args.enforce_eagr", "true"),
        ("actors.engine_args.enforce_eagr: vLLM has no such argument; did you mean 'enforce_eager'?",),
    ),
    Case(
        "a reserved argument",
        demo("--actors.engine_args.gpu_memory_utilization", "0.5"),
        ("actors.engine_args.gpu_memory_utilization is set by Leeway: use actors.gpu_memory_share",),
    ),
    Case(
        "an argument of a pool",
        demo("--pools.big", '{role = "actors", count = 2, engine_args = {quantisation = "fp8"}}'),
        ("pools.big.engine_args.quantisation: ", "did you mean 'quantization'?"),
    ),
    Case(
        "a reserved variable",
        demo("--launch.env.CUDA_VISIBLE_DEVICES", "0"),
        ("[launch.env] CUDA_VISIBLE_DEVICES cannot be set here: Ray gives each worker",),
    ),
    Case("bad variable", demo("--launch.env", '{"A-B" = "1"}'), ("'A-B' is not the name of an environment variable",)),
    Case(
        "a variable that is not text",
        demo("--launch.env", "{NCCL_DEBUG = [1]}"),
        ("launch.env.NCCL_DEBUG = [1]: input should be a valid string",),
    ),
    Case("too many CPUs", demo("--actors.cpus", "4000"), ("cpus of the workers add up to 8001",)),
    Case("no such cluster", demo("--launch.ray_address", "127.0.0.1:9"), ("no Ray cluster answers",)),
    # rows
    Case("no rows", task(b""), ("task.path: ", "rows.jsonl has no rows")),
    Case("only blank lines", task(b"\n\n  \n"), ("rows.jsonl has no rows",)),
    Case("no file of rows", task(path='"nowhere.jsonl"'), ("nowhere.jsonl does not exist",)),
    Case("a folder without rows", task(path='".."'), ("has no .jsonl, .ndjson, .parquet or .csv file",)),
    Case("rows in another format", task(path='"reward.py"'), ("ends in '.py'",)),
    Case("a long file name", task(path=f'"{"x" * 300}.jsonl"'), ("cannot be read: File name too long",)),
    Case(
        "rows in Latin-1", task(after('{"question": "caf\u00e9"}'.encode("latin-1"))), ("line 8 is not UTF-8", "0xe9")
    ),
    Case("rows in UTF-16", task(json_lines(ROWS).decode().encode("utf-16")), ("line 1 is not UTF-8", "iconv")),
    Case("a cut line", task(after(b'{"question": "1')), ("line 8 is not JSON: ", "at column 14")),
    Case("a line that ends early", task(after(b'{"question": ')), ("line 8 is not JSON: ", "at column 13")),
    Case("a list", task(after(b"[1, 2]")), ("line 8 holds a list; a row must be an object",)),
    Case("a lone surrogate", task(after(b'{"question": "\\ud800"}')), ("line 8 holds half of a", "('\\ud800')")),
    Case("nested", task(after(b'{"question": ' + b"[" * 1000 + b"]" * 1000 + b"}")), ("line 8 is nested too deeply",)),
    Case("nested deeper", task(after(b"[" * 100_000)), ("line 8 is nested too deeply",)),
    Case("long numbers", task(after(b'{"question": ' + b"7" * 5000 + b"}")), ("line 8 holds a number with thousands",)),
    Case("no question", task(after(b'{"qestion": "1"}')), ("row 8 has no column 'question'", "known: qestion")),
    Case("a question of a number", task(after(b'{"question": 1}')), ("row 8: 'question' must be non-empty text",)),
    Case(
        "no role",
        task(after(b'{"question": [{"content": "1"}]}')),
        ("row 8, column 'question': message 1 has no role",),
    ),
    Case(
        "text and messages",
        task(after(b'{"question": [{"role": "user", "content": "1"}]}')),
        ("row 8: the prompt is a list of messages, but earlier prompts are text",),
    ),
    Case(
        "no question in CSV",
        task(b"a,answer\n1,2\n", file="rows.csv"),
        ("has no column prompt or messages or question",),
    ),
    Case(
        "a filter that fails",
        task(reward=f"{REWARD}\ndef keep(row): return row['x']\n", filter='"reward.py:keep"'),
        ("task.filter = ", "raised KeyError: 'x' (at ", "row 1)"),
    ),
    Case(
        "a filter that returns text",
        task(reward=f"{REWARD}\ndef keep(row): return row['question']\n", filter='"reward.py:keep"'),
        ("task.filter = ", "return True to keep the row, else False"),
    ),
    Case("too few rows", task(num_train="5000"), ("but task.num_train = 5000",)),
    Case("nothing held out", task(json_lines(ROWS[:1])), ("1 distinct questions, ", "at least 1 is needed")),
    Case("invalid Parquet", task(b"PAR1junkPAR1", file="r.parquet"), ("r.parquet is not a readable Parquet file",)),
    Case("an empty Parquet", task(b"", file="r.parquet"), ("r.parquet is not a readable Parquet file",)),
    Case("a wide template", task(template='"{question:>9999999999999999}"'), ("task.template ", "row 1: ")),
    Case("a template with a conversion", task(template='"{question!x}"'), ("Unknown conversion specifier x",)),
    Case(
        "a parameter of another type", demo("--task.params", '{min_terms = "x"}'), ("task.params: chain_sum rejects",)
    ),
    Case("an unknown parameter", demo("--task.params.min_term", "2"), ("did you mean 'min_terms'?",)),
    Case("a template without a column", task(template='"hello"'), ("names no column",)),
    Case("a system turn without a chat", task(system_prompt='"hello"'), ("set chat = true",)),
    Case("a chat without its template", task(chat="true"), ("has no chat template; set chat = false",)),
    # rewards
    Case("no rewards", task(rewards="[]"), ("task.rewards is empty",)),
    Case("no file of rewards", task(rewards='["none.py:exact"]'), ("no file /",)),
    Case("no function", task(rewards='["reward.py"]'), ("is not of the form FILE.py:FUNCTION",)),
    Case("a mistyped function", task(rewards='["reward.py:exct"]'), ("defines no 'exct'; known: exact; did you mean",)),
    Case(
        "only its own functions",
        task(
            reward="from __future__ import annotations\nimport math\nE = math.e\n" + REWARD, rewards='["reward.py:f"]'
        ),
        ("defines no 'f'; known: exact\n",),
    ),
    Case("rewards that do not parse", task(reward="def exact(:\n"), ("is not Python", "line 1")),
    Case("rewards in Latin-1", task(reward=b"# caf\xe9\n" + REWARD.encode()), ("reward.py is not Python",)),
    Case("a missing argument", task(reward="def exact(solution):\n    pass\n"), ("needs an argument 'solution'",)),
    Case("a mistyped rule", task(rewards='["exat"]'), ("no rule or table has that name", "did you mean 'exact'?")),
    Case("a rule without its column", task(rewards='["code"]'), ("needs a column tests or test_list",)),
    Case(
        "an invalid pattern",
        task(rewards='["form"]', reward_rules='{form = {type = "regex", pattern = "(x"}}'),
        ("is not a regular expression: missing )",),
    ),
    Case("a function twice", task(rewards='["reward.py:exact", "reward.py:exact"]'), ("twice",)),
    # prompts
    Case("long prompts", demo("--actors.max_prompt_tokens", "2"), ("Set actors.max_prompt_tokens = 6",)),
    Case("one long prompt", task(after(b'{"question": "%s", "answer": "1"}' % (b"1" * 40))), ("1 of the task's 101",)),
    # the model
    Case("no model", demo("--model.path", "/nowhere"), ("no such folder",)),
    Case("a file as model", written("m", b"", "--model.path", "{file}"), ("no such folder",)),
    Case("no config.json", model(lambda folder: (folder / "config.json").unlink()), ("contains no config.json",)),
    Case(
        "junk for config.json",
        model(lambda folder: (folder / "config.json").write_bytes(b"\xff\0")),
        ("not valid JSON",),
    ),
    Case("no weights", model(lambda folder: (folder / "model.safetensors").unlink()), ("contains no *.safetensors",)),
    Case("empty weights", model(lambda folder: os.truncate(folder / "model.safetensors", 0)), ("as safetensors: ",)),
    Case("a cut header", model(lambda folder: os.truncate(folder / "model.safetensors", 60)), ("file is truncated, ",)),
    Case(
        "cut weights", model(lambda folder: os.truncate(folder / "model.safetensors", 20_000)), ("file is truncated, ",)
    ),
    Case("integers for weights", model(weights(as_int32)), ("is stored as I32", "plain weights")),
    Case("other names", model(weights(renamed)), ("query.weight", "its weights do not match its config.json")),
    Case("another size", model(sets(intermediate_size=333)), ("belong to another model",)),
    Case("more layers than weights", model(sets(num_hidden_layers=3)), ("has no tensor model.layers.2",)),
    Case("a small vocabulary", model(sets(vocab_size=5)), ("has shape [16, 128], but", "belong to another model")),
    Case("no vocabulary", model(sets(vocab_size="many")), ("has no vocab_size above 0 (found 'many')",)),
    Case("no layers", model(sets(num_hidden_layers=0)), ("has no num_hidden_layers above 0",)),
    Case("an end beyond the vocabulary", model(with_eos(99_999)), ("eos_token_id = 99999 is not in the vocabulary",)),
    Case("another family", model(sets(model_type="gpt2")), ("is of type 'gpt2'",)),
    Case("dynamic rotations", model(sets(rope_scaling={"rope_type": "dynamic", "factor": 2.0})), ("'dynamic'",)),
    Case(
        "long rotations",
        model(
            sets(rope_scaling={"type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8})
        ),
        ("'longrope'",),
    ),
    Case("dropout", model(sets(attention_dropout=0.1)), ("attention_dropout = 0.1", "set attention_dropout to 0")),
    Case("both directions", model(sets(use_bidirectional_attention=True)), ("use_bidirectional_attention",)),
    Case("quantized", model(sets(quantization_config={"quant_method": "gptq", "bits": 4})), ("quantization_config",)),
    Case("heads that do not divide", model(sets(num_attention_heads=5, head_dim=None)), ("model.path: ",)),
    Case("an unknown activation", model(sets(hidden_act="tahn")), ("model.path: ", "tahn")),
    Case(
        "no tokenizer",
        model(lambda folder: [each.unlink() for each in folder.glob("token*")]),
        ("has no tokenizer (",),
    ),
    Case(
        "junk for a tokenizer",
        model(with_file("tokenizer.json", b"{")),
        ("no loadable tokenizer",),
    ),
    Case("too long for the model", demo("--actors.max_prompt_tokens", "100"), ("supports at most 64 tokens",)),
]


@pytest.fixture
def nothing_starts(monkeypatch):
    """Fail the test if Ray starts or a model is fetched; `except Exception` does not catch `pytest.fail`."""
    import ray
    import torch

    def started(*_: object, **__: object) -> None:
        pytest.fail("got past the checks: Ray would start")

    monkeypatch.setattr(ray, "init", started)
    monkeypatch.setattr("leeway.launch.train.fetch_model", started)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


@pytest.mark.parametrize(
    ("overrides", "facts", "expected"),
    [
        (("--learner.gpus", "1"), {"is_available": False}, "cannot use the driver's GPUs"),
        (
            ("--learner.gpus", "1", "--learner.precision", "bfloat16"),
            {"capability": 7.5},
            "learner.precision = 'bfloat16', but GPU 0 (Tesla T4, 15 GiB) has compute capability 7.5, and bfloat16",
        ),
    ],
)
def test_an_unusable_gpu_is_an_input_error(capsys, tmp_path, monkeypatch, nothing_starts, overrides, facts, expected):
    import torch

    from leeway.launch import resources

    card = resources.Gpu(0, "GPU-a", "Tesla T4", "580.1", 15 * 2**30, 0, facts.get("capability", 9.0))
    monkeypatch.setattr(resources, "list_gpus", lambda: [card])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: facts.get("is_available", True))
    status = main(["train", str(DEMO), "--run.dir", str(tmp_path / "runs"), *overrides])
    error = capsys.readouterr().err
    assert (status, expected in error, error.count("\n")) == (ExitStatus.WRONG_INPUT, True, 1), error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_an_input_error_is_one_sentence_with_status_2_and_leaves_no_file(case, capsys, tmp_path, nothing_starts):
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    arguments = [str(each) for each in case.make(inputs)]
    before = sorted(inputs.rglob("*"))
    if "--run.dir" not in arguments:
        arguments += ["--run.dir", str(tmp_path / "runs")]
    status = main(["train", *arguments])
    error = capsys.readouterr().err
    assert status == ExitStatus.WRONG_INPUT, error
    assert error.startswith("leeway: ")
    assert error.count("\n") == 1, error
    assert len(error) < 1500, error
    assert "Traceback" not in error
    for words in case.expected:
        assert words in error, error
    assert not (tmp_path / "runs").exists()
    assert sorted(inputs.rglob("*")) == before


def test_the_guard_fails_on_valid_input(tmp_path, nothing_starts):
    with pytest.raises(pytest.fail.Exception, match="got past the checks"):
        main(["train", str(DEMO), "--run.dir", str(tmp_path / "runs")])


@pytest.mark.parametrize(
    ("name", "verb", "arguments"),
    [
        ("rows in Latin-1", "check-reward", ()),
        ("no function", "check-reward", ()),
        ("binary junk", "check-reward", ()),
        ("an unknown key", "doctor", ()),
        ("UTF-16", "doctor", ()),
        ("five thousand digits", "doctor", ("--json",)),
    ],
)
def test_other_subcommands_check_a_config_in_the_same_way(name, verb, arguments, capsys, tmp_path):
    case = next(each for each in CASES if each.name == name)
    status = main([verb, *map(str, case.make(tmp_path)), *arguments])
    captured = capsys.readouterr()
    assert (status, captured.out, captured.err.count("\n")) == (ExitStatus.WRONG_INPUT, "", 1), captured
    assert all(words in captured.err for words in case.expected)


@pytest.mark.parametrize(
    ("overrides", "change", "expected"),
    [
        (("--learner.num_stage", "2"), None, "did you mean learner.num_stages?"),
        (("--learner.num_stages", "9"), None, "has only 2 layers"),
        (("--actors.max_prompt_tokens", "2"), None, "Set actors.max_prompt_tokens = 6"),
        (("--run.seed", "9" * 30), None, "--run.seed: the number has 30 digits"),
        ((), lambda folder: (folder / "config.toml").write_bytes(b"\xff"), "config.toml: is not UTF-8 text"),
        ((), lambda folder: (folder / "config.toml").write_text("[run\n"), "config.toml: not valid TOML"),
        ((), lambda folder: (folder / "run.json").unlink(), "run.json cannot be read"),
        ((), lambda folder: (folder / "run.json").write_bytes(b"\xff\0"), "run.json is damaged"),
        ((), lambda folder: shutil.rmtree(folder), "no run at "),
    ],
)
def test_a_resumed_run_is_checked_and_stays_unchanged(capsys, tmp_path, nothing_starts, overrides, change, expected):
    made = plan(tmp_path / "run")
    made.folder.create(made.config)
    identity = RunIdentity(run_id=made.run_id, task_fingerprint=made.task.fingerprint, started_s=(100.0,))
    made.folder.write_identity(identity)
    if change is not None:
        change(made.folder.root)
    before = sorted(path for path in made.folder.root.rglob("*") if path != made.folder.claim)
    status = main(["resume", str(made.folder.root), *overrides])
    error = capsys.readouterr().err
    assert (status, error.count("\n"), expected in error) == (ExitStatus.WRONG_INPUT, 1, True), error
    assert sorted(path for path in made.folder.root.rglob("*") if path != made.folder.claim) == before


def test_a_config_with_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "c.toml").write_bytes(codecs.BOM_UTF8 + DEMO.read_bytes())
    assert load_config(tmp_path / "c.toml", ["--model.path", "m"]) == load_config(DEMO, ["--model.path", "m"])


@pytest.mark.parametrize(
    "error",
    [
        Exception("The current node timed out during startup.\nThis could happen because of load."),
        TimeoutError("the node"),
        AssertionError(),
        KeyError("GCS"),
    ],
)
def test_a_failed_start_of_ray_is_one_sentence(monkeypatch, error):
    import ray

    def init(**_: object) -> None:
        raise error

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RunFailed, match=r"^Ray failed to start: [^\n]+ load is lower$"):
        start_ray(load_config(DEMO), "test")
    with pytest.raises(RunFailed, match=r"^no Ray cluster answers at launch.ray_address = .auto.: [^\n]+$"):
        start_ray(load_config(DEMO, ["--launch.ray_address", "auto"]), "test")


def test_a_sigterm_during_the_start_of_ray_stops_the_run(monkeypatch):
    import ray

    def init(**_: object) -> None:
        # Ray's own signal handler exits like this if another thread received the signal.
        sys.exit(signal.SIGTERM)

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(Stopped):
        start_ray(load_config(DEMO), "test")
