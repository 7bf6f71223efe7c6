"""Chats reach the engine with the token ids that Transformers returns for the same messages and arguments."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.world.chats import byte_tokenizer

from leeway.actors.tasks import load_encoded
from leeway.actors.tasks.config import FileTask

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)
TURNS = st.lists(st.sampled_from(["user", "assistant", "tool"]), min_size=1, max_size=5)
CHATS = st.builds(
    lambda system, turns, texts: [
        {"role": role, "content": text} for role, text in zip([*system, *turns], texts, strict=False)
    ],
    st.sampled_from([[], ["system"]]), TURNS, st.lists(TEXT, min_size=6, max_size=6),
)  # fmt: skip
KWARGS = st.sampled_from([{}, {"enable_thinking": True}, {"enable_thinking": False}, {"unknown": [1, {"a": "b"}]}])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("chats")
    byte_tokenizer(made / "model")
    held = {"prompt": [{"role": "user", "content": "held out"}], "answer": "1"}
    (made / "held.jsonl").write_text(json.dumps(held))
    return made


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(chats=st.lists(CHATS, min_size=1, max_size=12), kwargs=KWARGS)
def test_prompts_have_the_ids_of_apply_chat_template(folder, chats, kwargs):
    rows = [{"prompt": chat, "answer": "1"} for chat in chats]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = FileTask(
        type="file", path=str(folder / "rows.jsonl"), heldout_path=str(folder / "held.jsonl"), rewards=("exact",),
        chat_template_kwargs=kwargs,
    )  # fmt: skip
    task, codec = load_encoded(config, folder / "model", 1000)
    assert len(task.train)
    for problem in task.train:
        chat = chats[problem.index - 1]
        is_open = chat[-1]["role"] == "assistant"
        expected = codec._tokenizer.apply_chat_template(
            chat, add_generation_prompt=not is_open, continue_final_message=is_open, return_dict=False, **kwargs
        )
        assert problem.token_ids == expected
