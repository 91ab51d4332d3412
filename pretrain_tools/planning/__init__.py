"""Plans a run before it starts: plan.py, train.py --text, --check and --smoke.

Predictions come from footprints and step_time (docs/plan.md).

    hardware_options: the machines that plan.py is asked about
    budget, budget_request, budget_report: from hours or dollars to a recipe; its options; its table
    candidates, report: which strategies fit, ranked; the report
    layouts: the processes of a run along each dimension of parallelism
    memory, activations, footprints: sizes and one process's part; a traced forward pass; what a process holds
    optimizer_bytes: what an optimizer keeps, allocates and sends
    memory_advice: what to change when memory runs out
    traffic, step_time: bytes and waiting under each strategy; time and cost
    own_text, text_files, sized_recipe: train.py --text; what it reads, what it chooses
    texts: recipes that are made here, and the sentences of plans, from templates/
    sizing, families: what size to train; its shape
    smoke: a hundred steps, pass or fail per stage
    width_check: whether a learning rate holds at other widths
    judgement: what --check says of a recipe that can run
"""
