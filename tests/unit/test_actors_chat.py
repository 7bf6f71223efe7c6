"""Prompts that are messages: rows of TRL and verl, chat templates, and what rewards receive."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from leeway.actors.rewards import Scorer, ScorerLimits
from leeway.actors.tasks import Problem, TaskError, check_task, load_encoded, load_reward, load_task
from leeway.actors.tasks.chat import PromptCodec, with_answer
from leeway.actors.tasks.config import FileTask
from leeway.launch.errors import ExitStatus
from tests.unit.test_actors_rows import DEMO, all_problems
from tests.world.chats import STRICT, byte_tokenizer, trl_rows, verl_rows
from tests.world.command import leeway_here
from tests.world.reward_callers import InThisProcess

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is "}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return `write(rows, kind, **changes)`, which makes a task of rows in a file of a kind."""
    monkeypatch.setattr("leeway.actors.tasks.prompts.HELDOUT_SHARE", 0.3)

    def written(rows, kind="jsonl", **changes):
        path = tmp_path / f"rows.{kind}"
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return FileTask(**{"type": "file", "path": str(path), "rewards": ("exact",), **changes})

    return written


@pytest.fixture
def model(tmp_path):
    """Keyword arguments of `check_task` for a model with a tokenizer of bytes."""
    byte_tokenizer(tmp_path / "model")
    return {"model_folder": tmp_path / "model", "max_prompt_tokens": 400, "vocab_size": 300}


def reward_file(tmp_path, body):
    path = tmp_path / "reward.py"
    path.write_text(body)
    return f"{path}:reward"


# --- rows as they are documented ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_rows_for_trl_load_and_rewards_receive_messages(write, model, tmp_path, kind, column):
    body = (
        "def reward(prompts, completions, ground_truth):\n"
        "    assert [each['role'] for each in prompts[0]] == ['system', 'user'], prompts\n"
        "    assert completions[0][0]['role'] == 'assistant' and len(completions[0]) == 1\n"
        "    return [float(c[0]['content'] == a) for c, a in zip(completions, ground_truth)]\n"
    )
    config = write(trl_rows(column=column), kind, rewards=(reward_file(tmp_path, body),))
    assert check_task(config, **model).rows == "20 read, 20 used, 0 duplicate, 0 skipped"
    task, codec = load_encoded(config, model["model_folder"], 400)
    assert len(all_problems(task)) == 20
    call = load_reward(task.rewards[0])
    for problem in all_problems(task):
        number = int(problem.columns["ground_truth"]) - 1
        assert problem.prompt == trl_rows(column=column)[number][column]
        style = f"<|im_start|>system\nAnswer briefly. Style {number % 3}.<|im_end|>\n"
        text = codec._tokenizer.decode(problem.token_ids)
        assert text == f"{style}<|im_start|>user\nWhat is {number} + 1?<|im_end|>\n<|im_start|>assistant\n"
        assert call([problem] * 2, [str(number + 1), "?"]) == [1.0, 0.0]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_for_verl_load_and_rules_read_their_ground_truth(write, model, kind):
    task, _ = load_encoded(write(verl_rows(), kind), model["model_folder"], 400)
    assert len(all_problems(task)) == 20
    for problem in all_problems(task):
        answer = problem.columns["reward_model"]["ground_truth"]
        assert load_reward(task.rewards[0])([problem] * 2, [answer, "?"]) == [1.0, 0.0]
    assert load_task(write(verl_rows(), kind)).train[0].columns["extra_info"]["split"] == "train"


async def test_the_data_source_of_a_row_selects_its_reward(write):
    rows = [*verl_rows(10), *verl_rows(20, "mine")[10:]]
    by_source = {"openai/gsm8k": "math", "mine": "contains"}
    task = load_task(write(rows, rewards=("math", "contains"), reward_by_source=by_source))
    scorer = Scorer(task.rewards, ScorerLimits(1, 20.0, start_timeout_s=20.0), start=InThisProcess.load)
    await scorer.start()
    try:
        for problem in all_problems(task):
            scored = await scorer.score(problem, problem.columns["reward_model"]["ground_truth"])
            one, other = ("math", "contains") if problem.columns["data_source"] != "mine" else ("contains", "math")
            assert scored.parts == {one: 1.0, other: None}
    finally:
        await scorer.close()


def test_a_row_whose_data_source_selects_no_reward_is_an_error(write):
    config = write(verl_rows(), rewards=("math",), reward_by_source={"openai/gsm8q": "math"})
    with pytest.raises(TaskError, match=r"no reward for data_source 'openai/gsm8k' of row .*did you mean 'openai/gsm"):
        check_task(config)
    check_task(config.model_copy(update={"rewards": ("math", "exact")}))  # exact scores all rows
    with pytest.raises(ValueError, match="reward_by_source names 'exact', but rewards has only math"):
        write(verl_rows(), rewards=("math",), reward_by_source={"mine": "exact"})


def test_messages_from_parquet_and_json_are_the_same_prompts(write):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chats = [
        [{"content": f"{number}", "role": "user"}, {"role": "assistant", "tool_calls": [call]},
         {"role": "tool", "name": "add", "content": "2"}]
        for number in range(20)
    ]  # fmt: skip
    rows = [{"messages": each, "answer": "1"} for each in chats]
    by_json, by_arrow = (load_task(write(rows, kind)) for kind in ("jsonl", "parquet"))
    assert by_json.facts() == by_arrow.facts()
    assert [each.prompt for each in by_arrow.train] == [each.prompt for each in by_json.train]
    assert by_arrow.train[0].prompt in chats
    assert list(by_arrow.train[0].prompt[0]) == ["role", "content"]


def test_the_prompt_column_is_named_or_found(write):
    rows = [
        {"question": f"q{number}", "prompt": f"p{number}", "other": f"o{number}", "answer": "1"} for number in range(20)
    ]
    assert load_task(write(rows)).train[0].text[0] == "p"
    assert load_task(write(rows, question_column="other")).train[0].text[0] == "o"
    with pytest.raises(TaskError, match=r"row 1 has no column 'othr', which is the prompt; .*did you mean 'other'"):
        load_task(write(rows, question_column="othr"))
    with pytest.raises(TaskError, match="has no column prompt or messages or question; known: answer, other"):
        load_task(write([{"other": "o", "answer": "1"}]))
    with pytest.raises(ValueError, match="template and question_column both define the prompt"):
        write(rows, question_column="other", template="{other}")


# --- templates ----------------------------------------------------------------------------------------


def encoded(model, prompt, **options):
    values = {"chat": False, "system_prompt": None, **options}
    codec = PromptCodec(model["model_folder"], **values)
    return codec._tokenizer.decode(codec.encode([prompt])[0])


def test_a_last_message_of_the_assistant_is_continued(model):
    text = encoded(model, [USER, ANSWER])
    assert text == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nIt is "
    assert with_answer([USER, ANSWER], "4") == [USER, {"role": "assistant", "content": "It is 4"}]
    assert with_answer("2+2?", "4") == [USER, {"role": "assistant", "content": "4"}]


def test_the_system_prompt_is_added_only_to_chats_without_one(model):
    own = {"role": "system", "content": "Own."}
    for chat, start in (([USER], "Ours."), ([own, USER], "Own.")):
        text = encoded(model, chat, chat=True, system_prompt="Ours.")
        assert text.startswith(f"<|im_start|>system\n{start}<|im_end|>\n<|im_start|>user")
        assert text.count("system") == 1


def test_arguments_reach_the_chat_template_and_ignored_ones_are_noted(write, model):
    kwargs = {"enable_thinking": False}
    assert encoded(model, [USER], chat_template_kwargs=kwargs).endswith("assistant\n<think>\n\n</think>\n\n")
    assert "think" not in encoded(model, [USER])
    facts = check_task(write(trl_rows(), chat_template_kwargs={**kwargs, "enable_thinkin": True}), **model)
    assert facts.unread_kwargs == ["enable_thinkin"]
    assert facts.answer_start == "<think>\n\n</think>"
    with pytest.raises(TaskError, match=r"chat_template_kwargs\.tokenize is not an argument of the template"):
        check_task(write(trl_rows(), chat_template_kwargs={"tokenize": True}), **model)


def test_rewards_receive_the_start_of_the_answer_that_the_template_writes(write, model):
    config = write(trl_rows(), chat_template_kwargs={"enable_thinking": False})
    task, codec = load_encoded(config, model["model_folder"], 400)
    ids = codec.ids(["4<|im_end|>"], special=False)[0]
    start = "<think>\n\n</think>\n\n"
    prompt_ids = task.train[0].token_ids
    assert codec.completion(prompt_ids, ids, prefill=True) == f"{start}4"
    assert codec.completion(prompt_ids, ids, prefill=True, special=True) == f"{start}4<|im_end|>"
    assert codec.completion(prompt_ids, ids, prefill=False) == "4"
    continued = codec.encode([[USER, ANSWER]])[0]
    assert codec.completion(continued, ids, prefill=True) == "4", "the row wrote this start, not the template"
    assert load_reward(load_task(write(trl_rows())).rewards[0])([task.train[0]], [f"{start}2"]) == [
        float(task.train[0].columns["ground_truth"] == "2")
    ]


def test_answers_stop_at_texts_and_tokens(write, model):
    config = write(trl_rows(), stop=("\n\nUser:", "é!", "<|im_end|>", 7))
    check_task(config, **model)
    _, codec = load_encoded(config, model["model_folder"], 400)
    end = codec.ids(["<|im_end|>"], special=False)[0]
    assert codec.stop_token_ids == [*end, 7], "the text of a special token is that token"
    ids = codec.ids(["4 é!\n\nUser: x"], special=False)[0]
    stopped = [codec.is_stopped(ids[:number]) for number in range(1, len(ids) + 1)]
    first = stopped.index(True) + 1
    assert codec.decode(ids[:first]) == "4 é!"
    assert codec.is_stopped(codec.ids(["x" * 50 + "\n\nUser:"], special=False)[0])
    assert codec.completion([], ids[:first], prefill=True) == "4 "
    assert codec.completion([], ids[:first], prefill=True, special=True) == "4 é!"
    with pytest.raises(TaskError, match=r"task\.stop: the model has no token 300"):
        check_task(config.model_copy(update={"stop": [300]}), **model)
    with pytest.raises(TaskError, match=r"task\.stop: the tokenizer cannot write 'x', so it ends no answer"):
        PromptCodec(DEMO, chat=False, system_prompt=None, stop=("7", "x")).check_stop(16)


def test_a_template_file_replaces_that_of_the_tokenizer(write, model, tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    config = write(trl_rows(), chat_template=str(path))
    task, codec = load_encoded(config, model["model_folder"], 400)
    assert codec._tokenizer.decode(task.train[0].token_ids).startswith("[system]Answer briefly.")
    before = task.facts().fingerprint
    assert before == check_task(config, **model).fingerprint != load_task(write(trl_rows())).facts().fingerprint
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert check_task(config, **model).fingerprint != before, "a resumed run would have other prompts"
    with pytest.raises(TaskError, match=r"chat_template: .*none.jinja cannot be read: .*No such file"):
        check_task(write(trl_rows(), chat_template=str(tmp_path / "none.jinja")), **model)
    with pytest.raises(TaskError, match=r"have no effect on prompts of text; set task\.chat = true"):
        check_task(write([{"prompt": f"{n}", "answer": "1"} for n in range(20)], chat_template=str(path)), **model)


def test_messages_need_a_chat_template(write, tmp_path):
    shutil.copytree(DEMO, tmp_path / "model")
    with pytest.raises(TaskError, match=r"row .*: the prompts are messages, but the tokenizer has no chat template"):
        check_task(write(trl_rows()), model_folder=tmp_path / "model", max_prompt_tokens=400, vocab_size=16)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([{"content": "2+2?"}], r"row 3, column 'prompt': message 1 has no role: {'content': '2\+2\?'}"),
        ([USER, "text"], "row 3, column 'prompt': message 2 has no role: text"),
        ([], "row 3, column 'prompt': the list of messages is empty"),
        ([{"role": "user"}], r"message 1 \(user\) has no content"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            r"message 1 \(user\) has no content of type text",
        ),
        ("2+2?", "row 3: the prompt is text, but earlier prompts are a list of messages; use one form"),
        (7, "row 3: 'prompt' must be non-empty text or a list of messages, got '7'"),
    ],
)
def test_the_error_for_a_malformed_chat_names_the_row(write, chat, message):
    rows = trl_rows()
    rows[2]["prompt"] = chat
    with pytest.raises(TaskError, match=message):
        check_task(write(rows))


def test_a_role_that_the_template_rejects_ends_the_command_before_anything_starts(write, tmp_path, capsys):
    byte_tokenizer(tmp_path / "tokenizer", STRICT)
    shutil.copytree(DEMO, tmp_path / "model")
    for path in (tmp_path / "tokenizer").iterdir():
        shutil.copy(path, tmp_path / "model")
    rows = [{**row, "prompt": row["prompt"][1:]} for row in trl_rows(40)]
    rows[30]["prompt"] = [{"role": "tool", "content": "3"}, *rows[30]["prompt"]]
    write(rows)
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "model"\n[task]\ntype = "file"\npath = "rows.jsonl"\nrewards = ["exact"]\n'
        '[algorithm]\ntype = "online_dpo"\n[actors]\nmax_prompt_tokens = 40\nmax_new_tokens = 8\n'
    )
    status, _, errors = leeway_here(capsys, "train", tmp_path / "run.toml", "--dry-run")
    assert status == ExitStatus.WRONG_INPUT == 2
    assert "row 31" in errors
    assert "the chat template rejects messages of the roles tool, user: Unknown role tool" in errors


def test_a_text_prompt_gives_text_to_rewards_even_with_a_chat_template(write, tmp_path):
    body = "def reward(prompts, completions): return [float(p + c == '2+2?4') for p, c in zip(prompts, completions)]\n"
    rows = [{"prompt": "2+2?" if number == 5 else f"{number}", "answer": "1"} for number in range(20)]
    task = load_task(write(rows, rewards=(reward_file(tmp_path, body),), chat=True))
    problem = next(each for each in all_problems(task) if each.text == "2+2?")
    assert load_reward(task.rewards[0])([problem], ["4"]) == [1.0]


def test_judges_and_logs_show_messages_as_text():
    assert Problem("", [USER], {}).text == "2+2?"
    assert Problem("", [{"role": "system", "content": "Brief."}, USER], {}).text == "system: Brief.\n\nuser: 2+2?"
