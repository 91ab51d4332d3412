"""The exit statuses of the scripts; docs/failures.md says what each means to whoever started one."""

EXIT_DONE = 0
CRASHED = 1
"""Of an end that nobody wanted."""
EXIT_BAD_INPUT = 2
EXIT_NUMERIC, EXIT_NO_VALID_CHECKPOINT, EXIT_CRASH_LOOP = 16, 17, 18
EXIT_PREEMPTED, EXIT_INTERRUPTED = 75, 130
