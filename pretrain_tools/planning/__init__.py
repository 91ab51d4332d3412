"""Plans runs before launch. Used by plan.py and by train.py's --text, --check and --smoke.

footprints predicts memory, and step_time predicts time (see docs/plan.md).

    plan_options: plan.py's hardware and budget options
    budget: chooses a run for a budget, prints it and writes its recipe
    candidates: ranks strategies
    report: prints the plan
    layouts: process meshes
    memory: model sizes and memory components of a process
    activations: traces activation memory
    fp8_shapes: fp8 layers for these traces
    footprints: peak memory per process
    optimizer_bytes: an optimizer's state, temporary memory and communication
    memory_advice: suggestions after an out-of-memory error
    traffic: communication per step
    step_time: time per step
    own_text: train.py --text
    text_files: finds the files for --text
    texts: renders templates/
    sizing: chooses a model size
    families: model families
    smoke: train.py --smoke
    width_check: muP's coordinate check
    judgement: train.py --check
"""
