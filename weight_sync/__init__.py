"""How weights travel from the learner to the actors, and how far behind they may be.

staleness    PolicyVersion, StalenessConfig and the StalenessContract that actors, buffer and learner share
manifest     Manifest: what a published version consists of, with a checksum for every tensor
files        files that appear whole or not at all
store        WeightStore: the folder of published versions; a version exists once its manifest does
publisher    Publisher: the learner's side, one per pipeline stage
puller       Puller: the actor's side, which verifies a version before anyone pauses for it
serving      the checkpoint folder that actors serve, checked and untied
vllm_engine  the plugin that vLLM loads in all its processes: registers the transfer, ties engines to their owner
vllm_transfer  StoreWeightTransfer: inside vLLM, verifies a version again and loads it

This package imports nothing by itself, so that the buffer can use `staleness` without torch.
"""
