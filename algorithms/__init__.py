"""Pure functions from log-probabilities to a loss, and their config sections.

inputs              LossInputs: what every loss may read; LossOutput: the loss and its metrics
registry            the algorithms by name, and the config union that `algorithm.type` selects from
trajectory_balance  VarGrad trajectory balance (TBA)
online_dpo          best-against-worst preference loss
off_policy_ppo      decoupled PPO with a group baseline
metrics             how far the data are from the policy, the same for every algorithm

This package imports torch and nothing of ours: it knows no pipeline, no buffer and no version.
"""
