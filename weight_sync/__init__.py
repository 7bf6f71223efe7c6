"""Weight transfer from the learner to the actors, with a bound on the staleness of served weights.

config       WeightSyncConfig: the [weight_sync] section

manifest     Manifest: contents of a published version, with a checksum per tensor; TensorFile: its files, read and
             written without torch; WeightsError: base class of the errors
tensors      conversion between published bytes and torch tensors; HostCopy: a stage's tensors in host memory
delta        lossless encoding of a tensor as its changes since the parent version
store        WeightStore: the folder of published versions; a version exists once its manifest does

publisher    Publisher: the learner's side, one per pipeline stage; PartMaker: builds the files of a stage

service      WeightService: serves the store to processes that cannot read its folder
             ServedVersions: versions that clients are reading; UploadReceiver: parts that stages are uploading
protocol     its messages
client       WeightClient: client of the service; StoreAccess: chooses between the store's folder and the service

puller       Puller: the actor's side; fetches a version and protects it from removal
staging      HostStaging: fetches a version once for all actors of a machine, and resumes interrupted downloads
host_folder  HostFolder: the folder of staged versions, and its removal; locks between the processes of a machine

vllm_engine  the plugin that vLLM loads in all its processes: ties engines to their owner; StoreWeightTransfer: verifies
             and loads a version inside vLLM

The package itself imports nothing. The service and its clients start without torch.
"""
