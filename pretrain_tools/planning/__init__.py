"""Plans runs before launch, for plan.py and train.py's --text, --check and --smoke.

Predictions are made in footprints and step_time (see docs/plan.md).

    hardware_options: plan.py's hardware options
    budget, budget_request, budget_report: makes a recipe for a budget; plan.py's budget options; the report
    candidates, report: ranks strategies; prints the plan
    layouts: process meshes
    memory, activations, footprints: model sizes per process; traced activations; memory per process
    optimizer_bytes: an optimizer's state, temporary memory and communication
    memory_advice: suggestions after an out-of-memory error
    traffic, step_time: communication per step; time per step
    own_text, text_files, sized_recipe: train.py --text; finds its files; writes its recipe
    texts: renders templates/
    sizing, families: chooses a model size; model families
    smoke: train.py --smoke
    width_check: muP's coordinate check
    judgement: train.py --check
"""
