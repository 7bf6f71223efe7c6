# %% [markdown]
# # Effect of lag on reward
#
# Reads the output of `leeway buffer export` and compares lag and reward of the samples used for training. The lag of a
# sample is the number of policy versions between sampling its oldest token and training on the sample.
#
#     leeway buffer export runs/NAME run.parquet
#     python examples/lag_and_reward.py run.parquet          # writes run.png, or prints a table
#
# The script needs NumPy and pyarrow, which are installed with Leeway. With matplotlib (`pip install matplotlib`), the
# script also draws a plot.
# To use the script as a notebook, open it in an editor that supports `# %%` cells, and set FILE below.

# %%
"""Compare lag and reward of the samples of an exported buffer."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

FILE = next((Path(argument) for argument in sys.argv[1:] if argument.endswith(".parquet")), Path("run.parquet"))

# %% [markdown]
# The script reads only the required columns: tokens and log-probabilities stay on disk. The lag of a sample is known if
# the buffer still stores the step that trained on the sample.

# %%
COLUMNS = ["state", "reward", "lag", "trained_step"]
table = pq.read_table(FILE, columns=COLUMNS)
trained = table.filter(pc.equal(table["state"], "trained"))
known = trained.filter(pc.and_(pc.is_valid(trained["lag"]), pc.is_valid(trained["reward"])))
print(f"{FILE}: {table.num_rows} samples, {trained.num_rows} trained, {known.num_rows} with known lag")
if known.num_rows == 0:
    sys.exit("No sample used for training has a known lag: there is nothing to compare.")

lag = known["lag"].to_numpy()
reward = known["reward"].to_numpy()
step = known["trained_step"].to_numpy()

# %% [markdown]
# Reward rises while a run learns, and lag is not spread evenly over the run: for example, lag is 0 at the start.
# Each sample is therefore also compared with the other samples of its step: `relative` is the reward of a sample minus
# the mean reward of the step. If only the plain mean has a slope over lag, the run's progress causes the slope.

# %%
_, place = np.unique(step, return_inverse=True)
step_mean = np.bincount(place, reward) / np.bincount(place)
relative = reward - step_mean[place]


def by_lag(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of the values at each lag and its standard error, assuming independent samples."""
    groups = [values[lag == each] for each in lags]
    means = np.array([group.mean() for group in groups])
    errors = np.array([group.std(ddof=1) / np.sqrt(len(group)) if len(group) > 1 else np.nan for group in groups])
    return means, errors


lags, counts = np.unique(lag, return_counts=True)
reward_mean, reward_error = by_lag(reward)
relative_mean, relative_error = by_lag(relative)

print(f"{'lag':>5} {'samples':>8} {'reward':>8} {'+-':>7} {'relative':>9} {'+-':>7}")
for row in zip(lags, counts, reward_mean, reward_error, relative_mean, relative_error, strict=True):
    print("{:>5} {:>8} {:>8.4f} {:>7.4f} {:>+9.4f} {:>7.4f}".format(*row))

# %% [markdown]
# The plot shows the numbers of the table; the bars show the number of samples at each lag.

# %%
try:
    import matplotlib
except ImportError:
    print("matplotlib is not installed: no plot")
else:
    if "ipykernel" not in sys.modules:
        matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, mean, error, name in (
        (axes[0], reward_mean, reward_error, "reward"),
        (axes[1], relative_mean, relative_error, "reward minus the mean of its step"),
    ):
        behind = axis.twinx()
        behind.bar(lags, counts, color="0.9", zorder=0)
        behind.set_ylabel("samples")
        axis.set_zorder(behind.get_zorder() + 1)
        axis.patch.set_visible(False)
        axis.errorbar(lags, mean, yerr=error, fmt="o-", capsize=3)
        axis.set_xlabel("lag, policy versions")
        axis.set_ylabel(name)
        axis.set_xticks(lags)
    picture = FILE.with_suffix(".png")
    figure.savefig(picture, dpi=120)
    print(f"plotted in {picture}")
