"""The check of the commands in the documents finds what is wrong in them."""

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
        ("leeway train examples/dema.toml", "there is no examples/dema.toml"),
        ("leeway train examples/demo-ppo.toml --actors.group_size 1", "exit status 2"),
        ("leeway export", "Missing argument 'RUN'"),
        ("make dema", "the Makefile has no target dema"),
        ("python examples/check_exports.py runs/NAME/model", "there is no examples/check_exports.py"),
        ("python benchmarks/off_policy.py --no-such-flag", "knows no --no-such-flag"),
        ("python -m tests.no_such_module", "there is no module tests.no_such_module"),
        ("launch/cluster.sh upp hosts", "launch/cluster.sh has no verb upp"),
        ("launch/cluster.sh start hosts", "launch/cluster.sh has no verb start"),
        ("launch/cluster.sh run examples/demo.toml --learner.num_stage 3", "did you mean learner.num_stages?"),
        ("FOO=1 leewai train", "nobody knows the program leewai"),
        ("source .venv/bin/activate && leeway trian x", "No such command 'trian'. Did you mean 'train'"),
        ("leeway train 'examples/demo.toml", "the shell cannot read it"),
    ],
)
def test_a_command_that_does_not_exist_is_found(tmp_path, capsys, line, expected):
    assert main([str(page(tmp_path, "make demo", line))]) == 1
    said = capsys.readouterr().out
    assert expected in said
    assert "page.md:5: " in said
    assert "2 commands in 1 documents: 1 wrong" in said


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


def test_lines_are_joined_and_what_is_no_command_is_left_alone(tmp_path):
    path = page(tmp_path, "# one", "leeway train examples/demo.toml \\", "    --learner.num_steps 3", "", "make demo")
    path.write_text(path.read_text() + "\n```toml\n[learner]\n```\nSee `leeway top`, and ``leeway nothing``.\n")
    found = [(command.where.rpartition(":")[2], " ".join(command.text.split())) for command in commands_in(path)]
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
        "- as in\n\n      python benchmarks/overlap.py\n",
    ],
)
def test_a_command_in_a_block_that_is_not_marked_is_found(tmp_path, capsys, block):
    path = tmp_path / "page.md"
    path.write_text(f"# A page\n{block}\n\nSee ```text\n")
    assert main([str(path)]) == 1
    assert "it stands in a block that is not marked as ```bash" in capsys.readouterr().out


def test_an_indented_block_that_is_marked_and_commands_in_sentences_are_looked_at(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("1. First\n\n   ```bash\n   leeway top\n   ```\n\nThen `make dema`, or\n`launch/cluster.sh up`.\n")
    found = list(commands_in(path))
    assert [(each.text, each.is_marked) for each in found] == [
        ("leeway top", True),
        ("make dema", True),
        ("launch/cluster.sh up", True),
    ]
    assert fault(found[1]) == "the Makefile has no target dema"


def test_a_link_to_what_is_not_there_is_found(tmp_path, capsys):
    path = tmp_path / "page.md"
    path.write_text("[a](page.md#part), [b](https://x.org/y),\n![c](no.svg), [d](#part), `[e](f)`\n```\n[g](h)\n```\n")
    assert [link.partition(":")[2] for link in dead_links(path)] == ["2: no.svg"]
    assert main([str(path)]) == 1
    assert "a link to what is not there" in capsys.readouterr().out


@pytest.mark.process  # a dry run of a task with a reward file tries it in one
def test_every_command_and_link_of_the_documents_leads_somewhere(capsys):
    assert main([]) == 0, capsys.readouterr().out


def test_the_readme_and_every_page_are_looked_at():
    names = {path.name for path in documents()}
    assert names >= {"README.md", "commands.md", "buffer.md", "staleness.md"}


def test_every_verb_stands_in_the_readme_and_on_the_page_of_the_commands():
    from typer.main import get_command

    from launch.cli import app

    root = Path(__file__).parents[2]
    verbs = get_command(app).commands
    for page in (root / "README.md", root / "docs" / "commands.md"):
        text = page.read_text()
        assert [verb for verb in verbs if f"leeway {verb} " not in text] == []
