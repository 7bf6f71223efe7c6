"""launch/cluster.sh on one machine with real processes: `down` during a run."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKES = {
    # The fake `leeway` works for 0.5 s after a SIGTERM, and then writes a checkpoint if its Ray is still alive. If its
    # folder has a file `slow`, the step never ends, and the fake stops on the second SIGTERM.
    "leeway": """#!/usr/bin/env bash
end() {
  signals=$((signals + 1))
  [ "$signals" = 1 ] || { echo "$signals" >stopped && exit 130; }
  [ ! -e slow ] || return 0
  sleep 0.5
  ! grep -q sleep "/proc/$(cat raylet)/cmdline" || touch checkpoint
  exit 130
}
signals=0
trap end TERM
touch training
while true; do sleep 0.1; done
""",
    # The fake `python -m leeway.launch.cluster_nodes` prints the output of a head whose cluster is this machine.
    "python": "#!/usr/bin/env bash\necho '127.0.0.1 up 4 0'\n",
}


class Alone:
    """A separate checkout whose cluster runs on this machine; a sleeping process replaces Ray."""

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
            assert time.monotonic() < deadline, "the run did not start within 60 s"
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
        """Run `down`, check that nothing is left, and return the lines of its output."""
        process = self._start("down", **environment)
        output = process.communicate(timeout=60)[0]
        assert (process.returncode, self.raylet.poll() is None) == (0, False), output
        assert self.run.wait(60) == 130
        assert not (self.checkout / "state").exists()
        return output.splitlines()

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


def test_down_lets_a_run_write_its_checkpoint_before_it_ends_ray(alone):
    first = f"localhost: requested a checkpoint and the end of all runs (process {alone.run.pid}); waiting up to"
    assert alone.down() == [f"{first} 720 s", "localhost: down"]
    assert (alone.checkout / "checkpoint").exists()


def test_down_stops_a_run_that_does_not_end_in_time(alone):
    (alone.checkout / "slow").touch()
    _, late, last = alone.down(LEEWAY_END_S="4")
    advice = "has not ended within 4 s (LEEWAY_END_S); stopping it now"
    assert (late, last) == (f"localhost: process {alone.run.pid} {advice}", "localhost: down")
    assert (alone.checkout / "stopped").read_text() == "2\n"
