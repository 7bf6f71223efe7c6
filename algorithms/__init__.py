"""Pure functions from log-probabilities to a loss, and their config sections.

registry            the algorithms by name, the config union that `algorithm.type` selects from, the loss of a config;
                    withholds from a loss what its Needs do not declare
base                LossInputs: what every loss may read; LossOutput: the loss and its metrics; Algorithm, its config
                    section, its Needs; group_advantages; refuses a batch that no loss can use
trajectory_balance  VarGrad trajectory balance (TBA)
online_dpo          best-against-worst preference loss
oapl                regression of log(pi / mu) on the optimal advantage
off_policy_ppo      decoupled PPO, over the advantages of a group, of the batch or of a critic (GAE)
distillation        on-policy distillation: reverse KL to a teacher, token by token
corrections         importance weights with truncations and masks, of objectives or of gradients; surrogates of PPO;
                    how far the data are from the policy

This package imports torch, and of ours only how a user's file is loaded: it knows no pipeline, no buffer and no
version.
"""
