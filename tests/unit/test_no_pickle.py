"""Nothing that arrives at a socket of ours can run code: our packages unpickle nothing, and ask nobody else to."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("actors", "algorithms", "buffer", "common", "launch", "learner", "weight_sync")
UNPICKLES = {
    "a pickle module": re.compile(r"\b(?:import|from)\s+(?:cloud|d|_)?(?:pickle|ill|marshal|shelve)\b"),
    "zmq's pickled objects": re.compile(r"\b(?:recv|send)_pyobj\b"),
    "torch.load beyond weights": re.compile(r"\btorch\.load\((?![^()]*weights_only=True)"),
    "numpy's pickled objects": re.compile(r"allow_pickle=True"),
    "collectives of objects": re.compile(r"\b(?:all_gather|gather|broadcast|scatter|send|recv)_object"),
    "code from text": re.compile(r"(?<![\w.])(?:eval|exec)\("),
}


ON_PURPOSE = {"code from text": "actors/sandbox.py"}
"""Programs that a model wrote are run there, in namespaces of their own."""


@pytest.mark.parametrize("what", UNPICKLES)
def test_our_packages_use_nothing_that_unpickles(what):
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if str(path.relative_to(ROOT)) != ON_PURPOSE.get(what)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if UNPICKLES[what].search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a pickle module", "import pickle"),
        ("a pickle module", "from cloudpickle import loads"),
        ("zmq's pickled objects", "message = socket.recv_pyobj()"),
        ("torch.load beyond weights", 'state = torch.load(path, map_location="cpu")'),
        ("numpy's pickled objects", "np.load(path, allow_pickle=True)"),
        ("collectives of objects", "dist.broadcast_object_list(told, src=0)"),
        ("code from text", "eval(text)"),
    ],
)
def test_the_search_finds_what_it_looks_for(what, line):
    assert UNPICKLES[what].search(line)


def test_the_search_lets_weights_pass():
    line = 'state = torch.load(path, map_location="cpu", weights_only=True)'
    assert not UNPICKLES["torch.load beyond weights"].search(line)
