"""The size of the product stays within its bounds: `python -m tests.house -v` lists the modules behind the figures."""

import re

import pytest

from leeway.launch.errors import ConfigError
from leeway.launch.host import check_folder
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


@pytest.mark.parametrize("figure", BOUNDS)
def test_the_size_stays_within_its_bound(figure):
    assert figures()[figure] <= BOUNDS[figure]


def test_a_module_with_one_importer_is_deep_or_has_a_reason():
    known = modules()
    shallow = {name: user for name, user in single_use(graph()).items() if known[name].num_lines < DEEP_LINES}
    assert shallow.keys() <= ALONE.keys(), "merge it into the module that imports it"


def test_the_checksum_that_compares_cluster_hosts_covers_every_package():
    script = (ROOT / "launch" / "cluster_host.sh").read_text()
    assert f"find {' '.join(PACKAGES)} -name '*.py'" in script


@pytest.mark.parametrize("package", PACKAGES)
def test_a_module_in_the_working_directory_that_shadows_a_package_is_refused(tmp_path, monkeypatch, package):
    monkeypatch.chdir(tmp_path)
    check_folder()
    (tmp_path / f"{package}.py").touch()
    with pytest.raises(ConfigError, match=f"in place of Leeway's own {package}"):
        check_folder()


def test_the_walks_on_the_architecture_page_name_existing_files():
    text = " ".join(PAGE.read_text().split(BEGIN)[1].split(END)[0].split())
    named = [
        (package, name) for package, names in re.findall(r"`(\w+)/` ([\w/, ]+)", text) for name in names.split(", ")
    ]
    assert len(named) > 100
    missing = [f"{package}/{name}" for package, name in named if f"{package}.{name.replace('/', '.')}" not in modules()]
    assert not missing, "run python -m tests.walks"


ALONE = {
    "leeway.planning.search": "closed-form bounds, which test the simulator, and the search that uses them",
    "leeway.learner.report": "the definition of a poisoned batch, next to the stage that detects it",
}
