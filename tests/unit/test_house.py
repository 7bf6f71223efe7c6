"""The house stays small enough to carry: `python -m tests.house -v` says where to look."""

import re

import pytest

from launch.errors import ConfigError
from launch.host import check_folder
from tests.house import DEEP_LINES, PACKAGES, ROOT, figures, graph, modules, single_use
from tests.walks import BEGIN, END, PAGE

BOUNDS = {
    "files": 153,
    "lines": 43_066,
    "lines without planning": 37_977,
    "lines of buffer": 7_266,
    "lines of launch": 10_967,
    "lines of shell": 910,
    "lines of the report's page": 395,
    "lines of examples": 1_020,
    "longest file": 461,
    "longest function": 57,
    "modules imported by exactly one other": 29,
    "import cycles": 0,
    "class names with two meanings": 0,
    "config keys": 104,
    "config keys inside tables": 48,
}


@pytest.mark.parametrize("what", BOUNDS)
def test_the_house_is_not_larger_than(what):
    assert figures()[what] <= BOUNDS[what]


def test_a_module_with_one_user_is_deep_or_says_why_it_stands_alone():
    known = modules()
    shallow = {name: user for name, user in single_use(graph()).items() if known[name].num_lines < DEEP_LINES}
    assert shallow.keys() <= ALONE.keys(), "fold it into the module that uses it"


def test_the_checksum_by_which_hosts_of_a_cluster_are_compared_is_over_every_package():
    script = (ROOT / "launch" / "cluster_host.sh").read_text()
    assert f"find {' '.join(PACKAGES)} -name '*.py'" in script


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_of_ours_may_be_taken_for_one_in_the_folder_of_the_command(tmp_path, monkeypatch, package):
    monkeypatch.chdir(tmp_path)
    check_folder()
    (tmp_path / f"{package}.py").touch()
    with pytest.raises(ConfigError, match=f"in place of Leeway's own {package}"):
        check_folder()


def test_the_walks_of_the_architecture_page_name_files_that_are_there():
    text = " ".join(PAGE.read_text().split(BEGIN)[1].split(END)[0].split())
    named = [
        (package, name) for package, names in re.findall(r"`(\w+)/` ([\w/, ]+)", text) for name in names.split(", ")
    ]
    assert len(named) > 100
    missing = [f"{package}/{name}" for package, name in named if f"{package}.{name.replace('/', '.')}" not in modules()]
    assert not missing, "run python -m tests.walks"


ALONE = {
    "planning.search": "closed forms, which the simulator is held to, and the search by them",
    "learner.report": "what a poisoned batch is, beside the stage that meets one",
}
