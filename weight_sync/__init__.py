"""How weights travel from the learner to the actors, and how far behind they may be.

config       WeightSyncConfig: every knob

manifest     Manifest: what a published version consists of, with a checksum for every tensor; TensorFile: its files,
             written and read without torch; WeightsError: what can go wrong with it
tensors      published bytes as torch tensors, and back; HostCopy: a stage's tensors in host memory
delta        a tensor as its changes since the parent version
store        WeightStore: the folder of published versions; a version exists once its manifest does

publisher    Publisher: the learner's side, one per pipeline stage; PartMaker: the files of a stage

service      WeightService: the process that holds the store for those who do not see its folder
             ServedVersions: what it reads for others just now; UploadReceiver: what it is being sent
protocol     its messages
client       WeightClient: what is asked of it; StoreAccess: is it needed, or is the store's folder seen?

puller       Puller: the actor's side, which takes a version and keeps it from removal
staging      HostStaging: what a machine fetches, once for all its actors, and resumes where it broke
host_folder  HostFolder: where that lies, and who may remove it; locks between the processes of a machine

vllm_engine  the plugin that vLLM loads in all its processes: ties engines to their owner; StoreWeightTransfer: inside
             vLLM, verifies a version and loads it

This package imports nothing by itself; what the service and its clients need starts without torch.
"""
