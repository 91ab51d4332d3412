"""Parallelism strategies, and communication between processes.

The training loop only calls the methods defined in `strategy`, so it's the same for all strategies. See
docs/new_strategy.md for how to add one.

    registry: all strategies by name
    strategy: base class, which also runs a single process or DDP
    mesh: any combination of replicas, FSDP2, and context, tensor, pipeline and expert parallelism
    dimension: base class for mesh dimensions
    mesh_tiles: each rank's tile of each parameter in a mesh
    block_tiles: checks whether a sharding works with 8-bit AdamW
    context_parallel: sequences sharded across ranks
    pipeline, pipeline_stages: layers split into stages
    tensor_parallel: matrices split across ranks
    expert_parallel: experts distributed across ranks
    fp8_gathers: all-gathers of fp8 weights
    zero, zero_partitions: DeepSpeed ZeRO
    ranks: rank, world size and collectives over CPU memory
    tensor_group: unsharded tensors by name, for checkpoints
    replicas: bitwise comparison of weight replicas
    launcher, launcher_files: reading the strategy from the launcher, and checking accelerate configs
    rendezvous: connecting the launched processes
"""
