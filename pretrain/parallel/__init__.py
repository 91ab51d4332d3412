"""Parallelism strategies and communication between processes.

The training loop is the same for all strategies, because it only calls the methods defined in `strategy`. To add a
strategy, see docs/new_strategy.md.

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
    fp8_gathers: fp8 all-gathers of weights
    zero, zero_partitions: DeepSpeed ZeRO
    ranks: rank, world size and CPU collectives
    tensor_group: unsharded tensors by name, for checkpoints
    replicas: bitwise comparison of weight replicas
    launcher, launcher_files: reads the strategy from the launcher, and checks accelerate configs
    rendezvous: connects the launched processes
"""
