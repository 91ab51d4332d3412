"""Plans a run before it starts: plan.py, train.py --text, --check and --smoke.

Predictions come from footprints and step_time (docs/plan.md).

    hardware_options: plan.py's options for the machines
    budget, budget_request, budget_report: a recipe for a budget; its command-line options; its report
    candidates, report: strategies that fit, ranked; the report
    layouts: number of processes along each dimension of parallelism
    memory, activations, footprints: sizes and one process's part; a traced forward pass; memory per process
    optimizer_bytes: bytes that an optimizer stores, allocates and sends
    memory_advice: changes that reduce memory when it runs out
    traffic, step_time: bytes sent and waiting time with each strategy; time and cost
    own_text, text_files, sized_recipe: train.py --text; the files it reads; the settings it chooses
    texts: generated recipes, and the sentences in plans, from templates/
    sizing, families: model size; model shape
    smoke: a hundred steps, with pass or fail per stage
    width_check: tests if a learning rate also works at other widths
    judgement: warnings of --check about a valid recipe
"""
