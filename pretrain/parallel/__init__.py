"""One recipe under any strategy: how the model and the data are divided, and how processes rendezvous.

The loop never asks which strategy runs: strategy gives it the verbs. A new one is a subclass and what
docs/strategies.md lists.

    strategy: one process and DDP, and the choice of the others
    ranks: the processes of a launch, and what they say to each other on the host
    tensor_group: whole tensors by name, for checkpoints
    fully_sharded: FSDP2 and HSDP
    zero, zero_partitions: DeepSpeed's ZeRO
    model_parallel, pipeline, pipeline_stages, tensor_parallel: models cut between processes
    replicas: copies of the weights compared bit by bit
    launcher, launcher_files: what the launcher asks for; what its files may say
    rendezvous, deepspeed_build: where restarted processes meet; what DeepSpeed compiles
"""
