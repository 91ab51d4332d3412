"""One recipe under any strategy: how the model and the data are divided, and how processes find each other.

The loop never asks which strategy runs: strategy gives it the verbs. How to add one: docs/strategies.md. Memory,
traffic and layouts, which a plan needs and a run does not, are in pretrain_tools/planning.

    registry: every strategy by name
    strategy: what all have in common: one process, and DDP
    ranks: the processes of a launch, and their communication on the host
    tensor_group: whole tensors by name, for checkpoints
    fully_sharded: FSDP2 and HSDP
    context_parallel: sequences cut between processes
    zero, zero_partitions: DeepSpeed's ZeRO
    model_parallel, pipeline, pipeline_stages, tensor_parallel, expert_parallel: models cut between processes
    replicas: copies of the weights compared bit by bit
    auto_settings: numbers in place of a recipe's `auto`
    launcher, launcher_files: the strategy that the launcher names; what its files may contain
    rendezvous: where restarted processes meet
"""
