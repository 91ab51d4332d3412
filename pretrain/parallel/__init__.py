"""One recipe under any strategy: how model and data are sharded, and how processes find each other.

The loop never asks which strategy runs: strategy defines the verbs that it calls. docs/new_strategy.md adds one.
Memory, traffic and layouts, which a plan needs and a run does not, are in pretrain_tools/planning.

    registry: every strategy by name
    strategy: base of all strategies: one process, and DDP
    mesh: any product of replicas, FSDP2, context, tensor, pipeline and expert parallel
    dimension: what a dimension of a mesh refuses, and does to a model and its gradients
    mesh_tiles: the part of each parameter that a rank of a mesh holds
    block_tiles: what 8-bit AdamW needs to know of these parts
    context_parallel: sequences sharded over ranks
    pipeline, pipeline_stages: layers divided into stages
    tensor_parallel: matrices split over ranks
    expert_parallel: experts divided over ranks
    fp8_gathers: weights of fp8 layers gathered in fp8
    zero, zero_partitions: DeepSpeed's ZeRO
    ranks: the processes of a launch, and their communication over CPU memory
    tensor_group: whole tensors by name, for checkpoints
    replicas: bitwise comparison of replicas
    launcher, launcher_files: the strategy that the launcher asks for; checks of its files
    rendezvous: how restarted processes meet
"""
