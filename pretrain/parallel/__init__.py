"""Parallelism: how the model and data are sharded, and how processes find each other.

The training loop doesn't depend on the strategy; it only calls the methods defined in `strategy`. docs/new_strategy.md
explains how to add a strategy. Only plans need memory, traffic and layout estimates, which are in
pretrain_tools/planning.

    registry: every strategy by name
    strategy: the base class of all strategies, which runs one process or DDP
    mesh: any product of replicas, FSDP2, context, tensor, pipeline and expert parallelism
    dimension: a mesh dimension's checks, and its changes to a model and its gradients
    mesh_tiles: each rank's part of each parameter in a mesh
    block_tiles: checks of these parts for 8-bit AdamW
    context_parallel: sequences sharded over ranks
    pipeline, pipeline_stages: layers divided into stages
    tensor_parallel: matrices split over ranks
    expert_parallel: experts divided over ranks
    fp8_gathers: fp8 layers' weights gathered in fp8
    zero, zero_partitions: DeepSpeed's ZeRO
    ranks: the launch's processes, and their communication through CPU memory
    tensor_group: whole tensors by name, for checkpoints
    replicas: bitwise comparison of replicas
    launcher, launcher_files: the strategy in an accelerate config, and checks of the files
    rendezvous: how restarted processes meet
"""
