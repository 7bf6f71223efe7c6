"""The check of commands and links in the docs reports each fault."""

from pathlib import Path

import pytest

from tests.docs_check import Command, commands_in, dead_links, documents, fault, main


def page(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "page.md"
    path.write_text("# A page\n\n```bash\n" + "\n".join(lines) + "\n```\n")
    return path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("leeway trian examples/demo.toml", "No such command 'trian'. Did you mean 'train'"),
        ("leeway buffer list runs/NAME", "No such command 'list'"),
        ("leeway buffer ls runs/NAME --by-reward", "No such option: --by-reward"),
        ("leeway train examples/demo.toml --dryrun", "No such option: --dryrun (Possible options: --dry-run)"),
        ("leeway train examples/demo.toml --learner.num_stage 3", "did you mean learner.num_stages?"),
        ("leeway resume NAME --learner.num_stage 3", "did you mean learner.num_stages?"),
        ("leeway train CONFIG.toml --weight_sync.max_lag many", "weight_sync.max_lag = 'many'"),
        ("leeway train examples/dema.toml", "examples/dema.toml does not exist"),
        ("leeway train examples/demo-ppo.toml --actors.group_size 1", "exit status 2"),
        ("leeway export", "Missing argument 'RUN'"),
        ("make dema", "the Makefile has no target dema"),
        ("python examples/check_exports.py runs/NAME/model", "examples/check_exports.py does not exist"),
        ("python benchmarks/off_policy.py --no-such-flag", "has no option --no-such-flag"),
        ("python -m tests.no_such_module", "module tests.no_such_module does not exist"),
        ("launch/cluster.sh upp hosts", "launch/cluster.sh has no subcommand upp"),
        ("launch/cluster.sh start hosts", "launch/cluster.sh has no subcommand start"),
        ("launch/cluster.sh run examples/demo.toml --learner.num_stage 3", "did you mean learner.num_stages?"),
        ("FOO=1 leewai train", "unknown program leewai"),
        ("source .venv/bin/activate && leeway trian x", "No such command 'trian'. Did you mean 'train'"),
        ("leeway train 'examples/demo.toml", "invalid shell syntax"),
    ],
)
def test_a_command_that_does_not_exist_is_reported(tmp_path, capsys, line, expected):
    assert main([str(page(tmp_path, "make demo", line))]) == 1
    out = capsys.readouterr().out
    assert expected in out
    assert "page.md:5: " in out
    assert "2 commands in 1 documents: 1 wrong" in out


@pytest.mark.parametrize(
    "line",
    [
        "leeway train examples/demo.toml --learner.num_steps 20   # a comment",
        "leeway buffer ls runs/NAME --phase ready | head",
        "leeway status [RUN] --json",
        "leeway buffer show RUN GROUP",
        "LEEWAY_EXTRA=gpu make install",
        "python examples/check_export.py runs/NAME/model > out.txt",
        "source .venv/bin/activate",
    ],
)
def test_a_command_that_exists_passes(line):
    assert fault(Command("here", line)) == ""


def test_continued_lines_are_joined_and_other_text_is_ignored(tmp_path):
    path = page(tmp_path, "# one", "leeway train examples/demo.toml \\", "    --learner.num_steps 3", "", "make demo")
    path.write_text(path.read_text() + "\n```toml\n[learner]\n```\nSee `leeway top`, and ``leeway nothing``.\n")
    found = [(command.location.rpartition(":")[2], " ".join(command.text.split())) for command in commands_in(path)]
    assert found == [
        ("5", "leeway train examples/demo.toml --learner.num_steps 3"),
        ("8", "make demo"),
        ("14", "leeway top"),
    ]


@pytest.mark.parametrize(
    "block",
    [
        "```\nleeway top\n```",
        "```\n# first\n$ launch/cluster.sh down\n```",
        "\n    make demo\n",
        "- for example\n\n      python benchmarks/overlap.py\n",
    ],
)
def test_a_command_in_an_unmarked_block_is_reported(tmp_path, capsys, block):
    path = tmp_path / "page.md"
    path.write_text(f"# A page\n{block}\n\nSee ```text\n")
    assert main([str(path)]) == 1
    assert "the block is not marked as ```bash" in capsys.readouterr().out


def test_marked_indented_blocks_and_inline_commands_are_checked(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("1. First\n\n   ```bash\n   leeway top\n   ```\n\nThen `make dema`, or\n`launch/cluster.sh up`.\n")
    found = list(commands_in(path))
    assert [(each.text, each.is_marked) for each in found] == [
        ("leeway top", True),
        ("make dema", True),
        ("launch/cluster.sh up", True),
    ]
    assert fault(found[1]) == "the Makefile has no target dema"


def test_a_link_to_a_missing_file_is_reported(tmp_path, capsys):
    path = tmp_path / "page.md"
    path.write_text("[a](page.md#part), [b](https://x.org/y),\n![c](no.svg), [d](#part), `[e](f)`\n```\n[g](h)\n```\n")
    assert [link.partition(":")[2] for link in dead_links(path)] == ["2: no.svg"]
    assert main([str(path)]) == 1
    assert "the link leads to a missing file" in capsys.readouterr().out


@pytest.mark.process  # a dry run starts a process to test a reward file
def test_every_command_and_link_of_the_docs_is_valid(capsys):
    assert main([]) == 0, capsys.readouterr().out


def test_the_readme_and_every_page_are_checked():
    names = {path.name for path in documents()}
    assert names >= {"README.md", "commands.md", "buffer.md", "staleness.md"}


def test_the_commands_page_contains_every_subcommand():
    from typer.main import get_command

    from leeway.launch.cli import app

    text = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    assert [verb for verb in get_command(app).commands if f"leeway {verb} " not in text] == []
