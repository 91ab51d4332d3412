"""JSON schemas for SkyPilot task files and Kubernetes JobSets, limited to the fields that the shipped files use.

Based on SkyPilot's YAML specification, the Kubernetes API for batch/v1 Jobs and Pods, and jobset.x-k8s.io/v1alpha2.
Unknown keys are errors, because clusters reject or silently drop them.
"""

TEXT, TEXTS, WHOLE = {"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "integer"}


def mapping(required: tuple[str, ...] = (), **properties) -> dict:
    """Returns a schema for objects that only allow these keys."""
    return {
        "type": "object", "properties": properties, "required": list(required), "additionalProperties": False
    }  # fmt: skip


def items(schema: dict) -> dict:
    return {"type": "array", "items": schema, "minItems": 1}


EXIT_STATUS = {"type": "integer", "minimum": 0, "maximum": 255}
SKYPILOT = mapping(
    ("resources", "run"),
    name={"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"},
    workdir=TEXT,
    num_nodes={"type": "integer", "minimum": 1},
    resources=mapping(
        accelerators={"type": "string", "pattern": r"^[A-Z0-9-]+:\d+$"},
        use_spot={"type": "boolean"},
        disk_size=WHOLE,
        job_recovery=mapping(
            strategy={"enum": ["FAILOVER", "EAGER_NEXT_REGION"]},
            max_restarts_on_errors={"type": "integer", "minimum": 0},
            recover_on_exit_codes=items(EXIT_STATUS),
        ),
    ),
    envs={"type": "object", "patternProperties": {"^[A-Z_]+$": TEXT}, "additionalProperties": False},
    secrets={
        "type": "object",
        "patternProperties": {"^[A-Z_]+$": {"type": ["string", "null"]}},
        "additionalProperties": False,
    },
    file_mounts={
        "type": "object",
        "additionalProperties": mapping(
            ("source",), source=TEXT, name=TEXT, mode={"enum": ["MOUNT", "COPY", "MOUNT_CACHED"]}
        ),
    },
    setup=TEXT,
    run=TEXT,
)

QUANTITY = {"anyOf": [WHOLE, {"type": "string", "pattern": r"^\d+(\.\d+)?(m|[kKMGT]i?)?$"}]}
RESOURCE = {"pattern": r"^(cpu|memory|[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?)$"}
"""Names of resources. Those of device plugins have a domain."""
CAPABILITY = {"type": "string", "pattern": "^(?!CAP_)[A-Z_]+$"}
"""Names of Linux capabilities, which Kubernetes writes without CAP_."""
LABEL = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
CONTAINER = mapping(
    ("name", "image"),
    name=LABEL,
    image=TEXT,
    command=TEXTS,
    args=TEXTS,
    env=items(mapping(("name", "value"), name=TEXT, value=TEXT)),
    envFrom=items(mapping(secretRef=mapping(("name",), name=LABEL))),
    resources=mapping(limits={"type": "object", "propertyNames": RESOURCE, "additionalProperties": QUANTITY}),
    securityContext=mapping(capabilities=mapping(add=items(CAPABILITY))),
    volumeMounts=items(mapping(("name", "mountPath"), name=LABEL, mountPath=TEXT, readOnly={"type": "boolean"})),
)
POD = mapping(
    ("containers", "restartPolicy"),
    restartPolicy={"enum": ["Never", "OnFailure"]},
    terminationGracePeriodSeconds=WHOLE,
    containers=items(CONTAINER),
    volumes=items(
        mapping(
            ("name",),
            name=LABEL,
            persistentVolumeClaim=mapping(("claimName",), claimName=LABEL),
            emptyDir=mapping(medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
        )
    ),
)
JOB = mapping(
    ("template",),
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    parallelism=WHOLE,
    completions=WHOLE,
    backoffLimit=WHOLE,
    podFailurePolicy=mapping(
        ("rules",),
        rules=items(
            mapping(
                ("action", "onExitCodes"),
                action={"enum": ["FailJob", "FailIndex", "Ignore", "Count"]},
                onExitCodes=mapping(
                    ("operator", "values"),
                    containerName=LABEL,
                    operator={"enum": ["In", "NotIn"]},
                    values=items(EXIT_STATUS),
                ),
            )
        ),
    ),
    template=mapping(("spec",), spec=POD),
)
JOB_FAILURES = [
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
]
JOBSET = mapping(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=mapping(("name",), name=LABEL),
    spec=mapping(
        ("replicatedJobs",),
        failurePolicy=mapping(
            maxRestarts=WHOLE,
            rules=items(
                mapping(
                    ("name", "action"),
                    name=LABEL,
                    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
                    onJobFailureReasons=items({"enum": JOB_FAILURES}),
                    targetReplicatedJobs=items(LABEL),
                )
            ),
        ),
        replicatedJobs=items(
            mapping(("name", "template"), name=LABEL, replicas=WHOLE, template=mapping(("spec",), spec=JOB))
        ),
    ),
)
