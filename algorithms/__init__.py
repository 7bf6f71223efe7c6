"""Pure functions from log-probabilities to a loss, and their config sections.

registry            the algorithms by name, the config classes selected by `algorithm.type`, and the loss of a config;
                    hides inputs that the Needs of a loss do not declare
base                LossInputs: the inputs of every loss; LossOutput: the loss and its metrics; Algorithm, its config
                    section and its Needs; group_advantages; validation of batches
trajectory_balance  VarGrad trajectory balance (TBA)
online_dpo          best-against-worst preference loss
oapl                regression of log(pi / mu) on the optimal advantage
off_policy_ppo      decoupled PPO with advantages from a group, the batch or a critic (GAE)
distillation        on-policy distillation: token-level reverse KL to a teacher
corrections         importance weights with truncations and masks, for objectives or gradients; surrogates of PPO;
                    off-policy metrics

This package imports torch and, from leeway, only `leeway.common.user_input`. The package is independent of pipelines,
buffers and versions.
"""
