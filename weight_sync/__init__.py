"""How weights travel from the learner to the actors, and how far behind they may be.

staleness    PolicyVersion, StalenessConfig and the StalenessContract that actors, buffer and learner share
config       WeightSyncConfig: every knob
errors       what can go wrong with published weights

manifest     Manifest: what a published version consists of, with a checksum for every tensor
tensor_file  the safetensors format without torch: written from buffers, read as views
tensors      published bytes as torch tensors, and back
delta        a tensor as its changes since the parent version
files        files that appear whole or not at all
locks        locks between processes, each with a limit and the name of who is waited for
store        WeightStore: the folder of published versions; a version exists once its manifest does

publisher    Publisher: the learner's side, one per pipeline stage
parts        HostCopy, PartMaker: a stage's tensors in host memory, and the files made of them
sinks        PartSink: where a publisher puts its part; FolderSink writes into the store's folder
upload       UploadSink: the same over ZeroMQ

service      WeightService: the process that holds the store for those who do not see its folder
served       which versions it serves just now; intake: what it is being sent
protocol     its messages; wire: how they are sealed, and an address that lasts, as the buffer service has them too
curve        the keys of a run, and the Doorkeeper who lets only their holders in; the buffer service has one too
link         Link: a connection to it that asks again; client: WeightClient, what is asked

puller       Puller: the actor's side, which verifies a version before anyone pauses for it
transports   the store's folder or the network: which of them a process takes
staging      HostStaging: what a machine fetched, once for all its actors
fetch        the transfer itself, resumed where it broke
host_folder  where it lies, and who may remove it

serving      the checkpoint folder that actors serve, checked and untied
vllm_engine  the plugin that vLLM loads in all its processes: registers the transfer, ties engines to their owner
vllm_transfer  StoreWeightTransfer: inside vLLM, verifies a version again and loads it

This package imports nothing by itself, so that the buffer can use `staleness` without torch.
"""
