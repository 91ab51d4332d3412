import time

t = time.time()
from pretrain.gpus import find_gpu
from pretrain.planning.budget import *
from pretrain.planning.families import FAMILIES

print("import", time.time() - t)
for fam, gpus, gpu, h in (("nanochat", 8, "h100", 3), ("llama", 1, "rtx4090", 8)):
    t = time.time()
    b = Budget(
        Hardware(find_gpu(gpu), gpus, -(-gpus // 8)), FAMILIES[fam], 65536 if fam == "nanochat" else 32000, hours=h
    )
    c, o = choose_run(b)
    for s in [c, *o]:
        print(
            fam,
            s.shape.layers,
            s.shape.width,
            count_text(s.shape.parameters),
            count_text(s.tokens),
            s.steps,
            s.batch,
            f"{s.tokens / s.shape.parameters:.1f} {s.expected_loss:.4f} mfu {s.mfu:.3f} {s.hours:.2f} ${s.cost:.0f}",
            s.combinations[0].in_words(),
            s.searched,
        )
    for k in c.combinations:
        print("   ", k.in_words(), f"{k.seconds:.3f} {k.candidate.memory.total / 2**30:.1f}")
    print(time.time() - t)
