"""launch/cluster.sh on this machine alone, with real processes: what `down` does to a run that is at work."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKES = {
    # `leeway`: asked to end it works on for half a second, and has a checkpoint if its Ray is still there then; where
    # its folder has a file `slow` the step has no end, and it stops when it is asked a second time
    "leeway": """#!/usr/bin/env bash
end() {
  asked=$((asked + 1))
  [ "$asked" = 1 ] || { echo "$asked" >stopped && exit 130; }
  [ ! -e slow ] || return 0
  sleep 0.5
  ! grep -q sleep "/proc/$(cat raylet)/cmdline" || touch checkpoint
  exit 130
}
asked=0
trap end TERM
touch training
while true; do sleep 0.1; done
""",
    # `python -m launch.cluster_nodes`: a head that knows this machine
    "python": "#!/usr/bin/env bash\necho '127.0.0.1 up 4 0'\n",
}


class Alone:
    """A checkout of its own whose cluster is up on this machine; its Ray is a process that sleeps."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder
        (folder / "launch").mkdir()
        for name in ("cluster.sh", "cluster_lib.sh", "cluster_host.sh"):
            shutil.copy(ROOT / "launch" / name, folder / "launch")
        (folder / ".venv" / "bin").mkdir(parents=True)
        for name, text in FAKES.items():
            (folder / ".venv" / "bin" / name).write_text(text)
            (folder / ".venv" / "bin" / name).chmod(0o700)
        session = folder / "state" / "ray-6379"
        session.mkdir(parents=True)
        (session / "auth_token").write_text("of a test")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "LEEWAY_"))}
        self._environment = {**kept, "HOME": str(folder), "LEEWAY_STATE": str(folder / "state")}
        self.raylet = subprocess.Popen(["sleep", "60"], env={**kept, "LEEWAY_RAY_SESSION": str(session)})
        (folder / "raylet").write_text(str(self.raylet.pid))
        self.run = self._start("run", "config.toml")
        deadline = time.monotonic() + 60
        while not (folder / "training").exists():
            assert time.monotonic() < deadline, "waited 20 s for the run"
            time.sleep(0.05)

    def _start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.checkout / "launch" / "cluster.sh", *arguments],
            env={**self._environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def down(self, **environment: str) -> list[str]:
        """What `down` says, after which nothing is left."""
        process = self._start("down", **environment)
        said = process.communicate(timeout=60)[0]
        assert (process.returncode, self.raylet.poll() is None) == (0, False), said
        assert self.run.wait(60) == 130
        assert not (self.checkout / "state").exists()
        return said.splitlines()

    def end(self) -> None:
        for process in (self.run, self.raylet):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def alone(tmp_path):
    made = Alone(tmp_path)
    yield made
    made.end()


def test_down_has_a_run_write_its_checkpoint_before_it_ends_ray(alone):
    asked = f"localhost: runs are asked to write a checkpoint and end (process {alone.run.pid}); waiting for at most"
    assert alone.down() == [f"{asked} 720 s", "localhost: down"]
    assert (alone.checkout / "checkpoint").exists()


def test_down_stops_a_run_that_does_not_end_in_time(alone):
    (alone.checkout / "slow").touch()
    _, late, last = alone.down(LEEWAY_END_S="4")
    advice = "has not ended within 4 s (LEEWAY_END_S), and is stopped now"
    assert (late, last) == (f"localhost: process {alone.run.pid} {advice}", "localhost: down")
    assert (alone.checkout / "stopped").read_text() == "2\n"
