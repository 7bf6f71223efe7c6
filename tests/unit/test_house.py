"""The size of the product stays within its bounds: `python -m tests.house -v` lists the counted modules."""

import re

import pytest

from tests.house import DEEP_LINES, PACKAGES, ROOT, figures, graph, modules, single_use
from tests.walks import BEGIN, END, PAGE

BOUNDS = {
    "files": 161,
    "lines": 44_845,
    "lines without planning": 39_749,
    "lines of buffer": 7_252,
    "lines of launch": 11_811,
    "lines of shell": 910,
    "lines of the report's page": 397,
    "lines of examples": 1_005,
    "longest file": 484,
    "longest function": 57,
    "modules imported by exactly one other": 32,
    "import cycles": 0,
    "class names with two meanings": 0,
    "config keys": 116,
    "config keys inside tables": 41,
}


@pytest.mark.parametrize("figure", BOUNDS)
def test_the_size_stays_within_its_bound(figure):
    assert figures()[figure] <= BOUNDS[figure]


def test_a_module_with_one_importer_is_deep_or_has_a_reason():
    known = modules()
    shallow = {name: user for name, user in single_use(graph()).items() if known[name].num_lines < DEEP_LINES}
    assert shallow.keys() <= ALONE.keys(), "merge the short module into the only module that imports it"


def test_the_checksum_that_compares_cluster_hosts_covers_every_package():
    script = (ROOT / "launch" / "cluster_host.sh").read_text()
    assert f"find {' '.join(PACKAGES)} -name '*.py'" in script


def test_the_walks_on_the_architecture_page_name_existing_files():
    text = " ".join(PAGE.read_text().split(BEGIN)[1].split(END)[0].split())
    named = [
        (package, name) for package, names in re.findall(r"`(\w+)/` ([\w/, ]+)", text) for name in names.split(", ")
    ]
    assert len(named) > 100
    files = {
        each.path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__") for each in modules().values()
    }
    assert {f"{package}/{name}" for package, name in named} <= files, (
        "the page names missing files: run `python -m tests.walks`"
    )


ALONE = {
    "leeway.planning.search": "closed-form bounds, which test the simulator, and the search that uses them",
    "leeway.learner.report": "the definition of a poisoned batch, next to the stage that detects it",
}
