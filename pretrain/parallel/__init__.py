"""One recipe under any strategy: how model and data are sharded, and how processes find each other.

The loop doesn't depend on the strategy. It calls the methods defined in `strategy`. docs/new_strategy.md adds a
strategy. Memory, traffic and layouts, which only plans need, are in pretrain_tools/planning.

    registry: every strategy by name
    strategy: base of all strategies: one process, and DDP
    mesh: any product of replicas, FSDP2, context, tensor, pipeline and expert parallel
    dimension: a mesh dimension's checks, and its changes to a model and its gradients
    mesh_tiles: each rank's part of each parameter in a mesh
    block_tiles: checks of these parts for 8-bit AdamW
    context_parallel: sequences sharded over ranks
    pipeline, pipeline_stages: layers divided into stages
    tensor_parallel: matrices split over ranks
    expert_parallel: experts divided over ranks
    fp8_gathers: weights of fp8 layers gathered in fp8
    zero, zero_partitions: DeepSpeed's ZeRO
    ranks: the processes of a launch, and their communication over CPU memory
    tensor_group: whole tensors by name, for checkpoints
    replicas: bitwise comparison of replicas
    launcher, launcher_files: the launcher's strategy; checks of its files
    rendezvous: how restarted processes meet
"""
