"""Flags of nanoGPT, transformers' run_clm, litgpt and torchtitan, and what does the same here."""

MICRO_BATCH = "--batch.sequences_per_micro_batch, sequences per process; the global batch is --batch.tokens_per_step"
GLOBAL_BATCH = "--batch.tokens_per_step, in tokens: sequences x --data.sequence_length"
LAUNCHED = "accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes N train.py ..."
MODEL_JSON = "in the model's JSON, which --model names; change one value of it with --model.NAME VALUE"
PREPARED = "prepare_data.py, whose folder is then named in data.train; for your own text also --text PATTERN"
NOT_NEEDED = "not needed here; leave it out"
RESUMES = "not needed here; the same command resumes"

OURS = {
    # nanoGPT
    "batch_size": MICRO_BATCH,
    "block_size": "--data.sequence_length",
    "max_iters": "--budget.steps",
    "lr": "--optim.learning_rate",
    "min_lr": "--optim.final_ratio, relative to the peak",
    "decay_lr": "--optim.schedule",
    "lr_decay_iters": "not needed here; the schedule ends with the budget",
    "warmup_iters": "--optim.warmup_steps",
    "grad_clip": "--optim.max_grad_norm",
    "beta1": "--optim.betas '[0.9, 0.95]'",
    "beta2": "--optim.betas '[0.9, 0.95]'",
    "gradient_accumulation_steps": "--batch.tokens_per_step, from which the number of micro-steps follows",
    "eval_interval": "--validation.every_steps",
    "eval_iters": "--validation.sequences",
    "eval_only": "python evaluate.py --model RUN --data FOLDER",
    "log_interval": "--logging.every_steps",
    "always_save_checkpoint": "--checkpoint.every_steps",
    "out_dir": "--output",
    "init_from": "--init pretrained with --model NAME; the same command resumes",
    "dataset": PREPARED,
    "dtype": "--precision",
    "device": "CUDA_VISIBLE_DEVICES=0 before the command, or nothing after the = sign for the CPU",
    "n_layer": "--model.num_hidden_layers, in a model's JSON of Llama's names",
    "n_head": "--model.num_attention_heads, in a model's JSON of Llama's names",
    "n_embd": "--model.hidden_size, in a model's JSON of Llama's names",
    "dropout": MODEL_JSON,
    "wandb_log": "--trackers '[wandb]'",
    "wandb_project": "--trackers '[wandb]' with --group NAME",
    "wandb_run_name": "--output, whose last part names the run",
    # run_clm and transformers' Trainer
    "model_name_or_path": "--model NAME with --init pretrained",
    "config_name": "--model",
    "config_overrides": MODEL_JSON,
    "model_type": MODEL_JSON,
    "tokenizer_name": "prepare_data.py --tokenizer",
    "train_file": PREPARED,
    "validation_file": PREPARED,
    "dataset_name": "prepare_data.py --dataset",
    "dataset_config_name": "prepare_data.py --dataset",
    "validation_split_percentage": PREPARED,
    "per_device_train_batch_size": MICRO_BATCH,
    "per_device_eval_batch_size": MICRO_BATCH,
    "num_train_epochs": "--budget.tokens, or max_epochs of a source in data.train",
    "max_steps": "--budget.steps",
    "warmup_ratio": "--optim.warmup_steps",
    "lr_scheduler_type": "--optim.schedule",
    "adam_beta1": "--optim.betas '[0.9, 0.95]'",
    "adam_beta2": "--optim.betas '[0.9, 0.95]'",
    "adam_epsilon": "--optim.eps",
    "output_dir": "--output",
    "overwrite_output_dir": "another --output; the same one resumes",
    "logging_steps": "--logging.every_steps",
    "save_steps": "--checkpoint.every_steps",
    "save_total_limit": "--checkpoint.keep_last",
    "eval_steps": "--validation.every_steps",
    "eval_strategy": "--validation.every_steps",
    "evaluation_strategy": "--validation.every_steps",
    "bf16": "--precision bf16",
    "fp16": "--precision fp16",
    "gradient_checkpointing": "--activation_checkpointing full",
    "torch_compile": "--compile regional",
    "torch_dtype": "--precision",
    "report_to": "--trackers",
    "resume_from_checkpoint": RESUMES,
    "resume": RESUMES,
    "do_train": NOT_NEEDED,
    "do_eval": NOT_NEEDED,
    "push_to_hub": "--hub.repository OWNER/NAME",
    "deepspeed": "accelerate launch --config_file accelerate_configs/zero2.yaml ...",
    "fsdp": "accelerate launch --config_file accelerate_configs/fsdp2.yaml ...",
    # litgpt
    "model_name": "--model",
    "model_config": "--model",
    "initial_checkpoint_dir": "--model FOLDER with --init pretrained",
    "tokenizer_dir": "prepare_data.py --tokenizer",
    "devices": LAUNCHED,
    "num_nodes": "slurm/many_nodes.sbatch, or accelerate launch --num_machines N ...",
    "optimizer": "--optim.name",
    "logger_name": "--trackers",
    "train.max_tokens": "--budget.tokens",
    "train.max_steps": "--budget.steps",
    "train.epochs": "--budget.tokens, or max_epochs of a source in data.train",
    "train.global_batch_size": GLOBAL_BATCH,
    "train.micro_batch_size": MICRO_BATCH,
    "train.max_seq_length": "--data.sequence_length",
    "train.lr_warmup_steps": "--optim.warmup_steps",
    "train.max_norm": "--optim.max_grad_norm",
    "train.min_lr": "--optim.final_ratio, relative to the peak",
    "train.log_interval": "--logging.every_steps",
    "train.save_interval": "--checkpoint.every_steps",
    "train.tie_embeddings": MODEL_JSON,
    "eval.interval": "--validation.every_steps",
    "eval.max_iters": "--validation.sequences",
    # torchtitan
    "job.config_file": "--config",
    "model.flavor": "--model",
    "training.local_batch_size": MICRO_BATCH,
    "training.global_batch_size": GLOBAL_BATCH,
    "training.seq_len": "--data.sequence_length",
    "training.steps": "--budget.steps",
    "training.max_norm": "--optim.max_grad_norm",
    "optimizer.name": "--optim.name",
    "optimizer.lr": "--optim.learning_rate",
    "lr_scheduler.warmup_steps": "--optim.warmup_steps",
    "metrics.log_freq": "--logging.every_steps",
    "checkpoint.interval": "--checkpoint.every_steps",
    "validation.freq": "--validation.every_steps",
    "activation_checkpoint.mode": "--activation_checkpointing",
}
"""{their flag: ours}."""


def answer_in_ours(flag: str, settings: list[str]) -> str | None:
    """What another project's flag, or a setting without its section, is called here; None for a setting of ours.

    Args:
        settings: dotted paths of all settings.
    """
    name = flag.removeprefix("--").partition("=")[0].replace("-", "_")
    if name in settings:
        return None
    if name in OURS:
        return f"--{name}: {'' if OURS[name].startswith('not ') else 'here it is '}{OURS[name]}"
    if homes := [f"--{path}" for path in settings if path.rpartition(".")[2] == name]:
        return f"--{name}: needs its section: {' or '.join(homes)}"
    return None
