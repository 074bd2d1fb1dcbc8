"""Steps and gathers that were measured, each with all of its runs: what `fit_steps.py` fits to and compares with.

Milliseconds, torch 2.11.0+cu130, H200s of one host, 8 Llama-shaped blocks of dim 4096 and ffn 14336. The runs are
by several harnesses on several machines; where a range was recorded, both of its ends are runs. Since
groups gather codes and copy gradients in few steps, gathers with the host, steps as called of sequence 512 on two
ranks, which the host decides, and those of sequence 4096, batch 1 and products in low precision are those of two H100s,
except torchao's and some of bf16's. Points that constants are fitted to have the runs of before the fit.
"""

from __future__ import annotations

# What travels of a step on two ranks: 16 gathers.
IN_STEPS = {
    "NVLink": {"bf16": 15.3, "fp8_block": 8.0, "mxfp8": 8.1, "nvfp4": 4.8},
    "sockets": {"bf16": 369, "torchao": 189, "fp8_block": 185, "mxfp8": 188, "nvfp4": 97},
}
OTHERS_IN_STEPS = {"torchao": 7.7, "cast fp8_block": 8.9, "cast mxfp8": 8.8, "cast nvfp4": 5.3}
REDUCED = (370, 411)  # 8 reduce-scatters over sockets
# Products of a step at batch 4: two harnesses.
CARD = {"bf16": (238.1, 253.5), "torchao": (145.0, 129.0), "fp8_current+low": (123.8,), "fp8_block+low": (153.2,)}
# One gather by itself, on two and four ranks, and until weights can be multiplied with; the same of blocks of 70B.
ALONE = {
    2: {"bf16": 0.888, "fp8_block": 0.475, "mxfp8": 0.487, "nvfp4": 0.380},
    4: {"bf16": 1.139, "fp8_current": 0.651, "mxfp8": 0.648, "nvfp4": 0.359},
}
READY = {"bf16": 1.271, "fp8_block": 0.690, "mxfp8": 0.732, "nvfp4": 0.392}
READY_70B = {"bf16": 4.327, "fp8_block": 2.387, "nvfp4": 1.290}
# Gathers until the weights are there, with the host: on the card, and what the host took.
WAITED = {
    2: {
        "bf16": (1.435, 0.348),
        "mxfp8": (0.876, 0.338),
        "fp8_block": (0.871, 0.399),
        "fp8_current": (1.066, 0.902),
        "nvfp4": (0.537, 0.398),
    },
    4: {"bf16": (1.593, 0.347)},
}
# Whole steps: sequence, batch, ranks, link and how; *: constants are fitted to the middle of its runs.
STEPS = """
512 1 2 NVLink eager: bf16 53 57 70.3 86.8 67.3 67.1 58.0 56.0*, fp8_block 93.8 75.4 64.8 59.2, cast fp8_block 82.5*
512 1 2 NVLink eager: nvfp4 97.2 73.8 66.4 55.4, mxfp8 70.2 66.5 56.5, cast nvfp4 81.0*, torchao 145 163 190.5
512 1 2 NVLink compiled: bf16 63.0 70.2 63.4 70.3 52.2 51.0 51.2, fp8_block 76.1 66.7 56.4 50.8
512 1 2 NVLink compiled: nvfp4 77.2 69.0 57.7 50.4, mxfp8 72.5 54.0 51.6
512 1 2 NVLink compiled: cast fp8_block 74.1*, cast nvfp4 81.9
512 1 1 NVLink eager: bf16 67.6 51.3 50.5 52.2
512 1 1 NVLink compiled: bf16 60.3 60.3 83.4
512 1 2 NVLink compiled-graph: bf16 40.6 41.3, fp8_block 37.6, mxfp8 38.2, nvfp4 36.4 36.7, fp8_current+low 36.0 36.3
512 1 2 NVLink compiled-graph: cast fp8_block 38.2, cast nvfp4 36.5
512 1 2 NVLink eager-graph: bf16 40.6, fp8_block 37.8, mxfp8 38.5, nvfp4 36.4, cast nvfp4 36.6
4096 1 2 NVLink eager: bf16 108.7 106.0 109.1 109.0 106.0 106.8 108.8, fp8_block 112, mxfp8 113, nvfp4 114 103.4
4096 1 2 NVLink eager: cast fp8_block 123, cast mxfp8 121, cast nvfp4 116, torchao 191 215.4 179.5
4096 1 2 NVLink eager: fp8_current+low 79.9 77.8 78.6, fp8_block+low 87.5, fp8_rowwise+low 88.2 89.6
4096 4 2 NVLink eager: bf16 349 343.4 350.9 352.1, fp8_block 345, mxfp8 344, nvfp4 349
4096 4 2 NVLink eager: cast fp8_block 350, cast mxfp8 347, cast nvfp4 349, torchao 491 518.2*
4096 4 2 NVLink eager: fp8_current+low 237.9 249.7 243.8, fp8_block+low 270.6
4096 1 2 NVLink compiled: bf16 108.3 105.5 107.1 108.1*, fp8_block 106, mxfp8 112, nvfp4 112
4096 1 2 NVLink compiled: cast fp8_block 122, cast mxfp8 120, cast nvfp4 116
4096 1 2 NVLink compiled: fp8_rowwise+low 100.3
4096 1 2 NVLink compiled: torchao 96.1 132.6 98.6 104.0
4096 4 2 NVLink compiled: bf16 335 336.9 344.8 344.7 340.9*, fp8_block 331, mxfp8 333, nvfp4 331
4096 4 2 NVLink compiled: cast fp8_block 333, cast mxfp8 330, cast nvfp4 331
4096 4 2 NVLink compiled: torchao 243 246.3 252.2 251.6 249.5 244.4 248.7
4096 4 2 NVLink compiled: fp8_current+low 231.5 237.1 237.2 231.9 227.7 231.2
4096 4 2 NVLink compiled: fp8_block+low 264.9, fp8_rowwise+low 269.1
4096 1 2 NVLink compiled-graph: bf16 104.9 105.7, torchao 86.4 87.5, fp8_current+low 76.1 77.0, fp8_block+low 81.5
4096 1 2 NVLink compiled-graph: fp8_block 100.2, cast nvfp4 101.1
4096 1 2 NVLink eager-graph: bf16 104.7, fp8_current+low 78.6, fp8_block+low 82.9
4096 4 2 NVLink compiled-graph: bf16 338.5 339.1, torchao 242.8 242.1 247.7
4096 4 2 NVLink compiled-graph: fp8_current+low 229.8 228.1 224.2 232.0 229.6
4096 4 2 NVLink compiled-graph: fp8_block+low 255.1, fp8_block 328.6, cast nvfp4 331.9
4096 4 2 NVLink eager-graph: bf16 342.8, fp8_current+low 235.1, fp8_block+low 260.7
4096 1 1 NVLink compiled: bf16 104.4 104.7 104.8 104.1, torchao 111.2 137.2 101.3
4096 1 1 NVLink compiled: fp8_current+low 87.6, fp8_block+low 88.8
4096 4 1 NVLink compiled: bf16 334.5 329.3, torchao 254.5 250.7, fp8_current+low 227.6 223.0*, fp8_block+low 250.4
4096 1 1 NVLink eager: bf16 104.5 105.6 105.1 106.1, torchao 188.7, fp8_current+low 90.5, fp8_block+low 101.0
4096 1 4 NVLink eager: bf16 107 109.2, torchao 182 193.1, fp8_current+low 81.8, fp8_rowwise+low 94.9, nvfp4 102.5
4096 1 4 NVLink compiled: bf16 108 107.3, torchao 104 88.9, fp8_current+low 75.5, fp8_rowwise+low 95.2, nvfp4 100.5
4096 1 2 sockets eager: bf16 848 1012.2 790.0 827.7*, fp8_block 642 653.9*, nvfp4 554 567.0 568.4*, mxfp8 715
4096 1 2 sockets eager: torchao 748 695.3, fp8_current+low 651.6, cast nvfp4 550
4096 1 2 host-memory eager: bf16 300.9 303.3, nvfp4 208.1 207.1, fp8_block 233.0, fp8_current+low 227.6 225.9
"""
# Steps whose gradients are exchanged, in the same form; nothing is fitted to them. In all runs but the last of batch 4
# gradients were copied on the stream of backward, and not, as now and in the estimate, on the one that sends them.
EXCHANGED = """
512 1 2 NVLink compiled-graph: bf16 37.3, nvfp4 31.6, fp8_current+low 30.3
4096 1 2 NVLink compiled-graph: fp8_current+low 73.9
4096 4 2 NVLink compiled-graph: fp8_current+low 228.1 224.7
4096 4 2 NVLink compiled: fp8_current+low 225.6 229.1
4096 1 2 sockets eager: bf16 713.9, nvfp4 426.0
4096 1 2 host-memory eager: bf16 244.5, nvfp4 148.0, fp8_current+low 167.3
"""
# On two H100s, whose memory is slower: steps with gradients reduced in fp32 and, +exchange, exchanged; none is fitted
# to. All gradients were copied on the stream of backward.
ON_H100S = """
512 1 2 NVLink compiled: bf16 80.0, bf16+exchange 74.4
4096 1 2 NVLink compiled: bf16 113.8, torchao 98.6, fp8_current+low 83.8, fp8_block+low 89.2
4096 1 2 NVLink eager: bf16 116.0
4096 1 2 NVLink compiled-graph: bf16 112.0, torchao 96.3, fp8_current+low 84.0, fp8_current+low+exchange 81.6
4096 4 2 NVLink compiled-graph: bf16 344.7 341.5, torchao 257.1 254.9, fp8_current+low 245.1 240.5
4096 4 2 NVLink compiled-graph: fp8_current+low+exchange 241.8 238.7
4096 1 2 host-memory eager: bf16 309.1, bf16+exchange 257.4, nvfp4 221.4, nvfp4+exchange 163.5
4096 1 2 host-memory eager: fp8_current+low 262.6, fp8_current+low+exchange 194.2
4096 1 2 sockets eager: bf16 922.1, bf16+exchange 850.8, nvfp4 591.9, nvfp4+exchange 567.9
"""
# On two H100s: steps as CUDA graphs whose weights are dequantized on gather, and those beside them; none is fitted to.
ON_GATHER = """
512 1 2 NVLink compiled-graph: bf16 48.9 49.2 49.0, nvfp4+exchange 38.4 38.5, nvfp4+on_gather+exchange 38.9 39.0 38.9
512 1 2 NVLink compiled-graph: mxfp8+on_gather+exchange 42.8, fp8_block+on_gather+exchange 42.3
"""
# Steps as called beside bf16 in the same process, by turns: the host's time, which differs from machine to machine, is
# found from bf16's step (`layoutc.estimate.machine`). What products in low precision, and the peer, take of it is
# fitted to nine. Steps in low precision are those since eager linear layers are straight-line code, and compiled graphs
# keep launches and find amaxes by rows.
PAIRED = """
512 1 2 NVLink compiled H100: bf16 70.2, fp8_block 76.1, nvfp4 77.2
512 1 2 NVLink compiled H100: bf16 63.4, fp8_block 66.7, nvfp4 69.0, mxfp8 72.5, nvfp4+on_gather 54.5
512 1 2 NVLink compiled H100: bf16 63.4, nvfp4+on_gather+exchange 52.9
512 1 2 NVLink compiled H100: bf16 70.3, cast fp8_block 74.1, cast nvfp4 81.9
512 1 2 NVLink compiled H100: bf16 51.0, fp8_block 50.8, nvfp4 50.4, mxfp8 51.6
512 1 2 NVLink compiled H100: bf16 52.2, fp8_block 56.4, nvfp4 57.7, mxfp8 54.0
512 1 2 NVLink eager H100: bf16 86.8, fp8_block 93.8, nvfp4 97.2
512 1 2 NVLink eager H100: bf16 67.3, fp8_block 75.4, nvfp4 73.8, mxfp8 70.2, nvfp4+on_gather 60.1
512 1 2 NVLink eager H100: bf16 67.3, nvfp4+on_gather+exchange 59.3
512 1 2 NVLink eager H100: bf16 67.1, cast fp8_block 82.5, cast nvfp4 81.0
512 1 2 NVLink eager H100: bf16 56.0, fp8_block 59.2, nvfp4 55.4, mxfp8 56.5
512 1 2 NVLink eager H100: bf16 58.0, fp8_block 64.8, nvfp4 66.4, mxfp8 66.5
512 1 2 NVLink compiled H100: bf16 60.7, nvfp4+on_gather+exchange 53.9, fp8_block+on_gather+exchange 50.9
512 1 2 NVLink compiled H100: bf16 60.7, bf16+exchange 55.8
512 1 2 NVLink compiled H100: bf16 62.5, fp8_current+on_gather+exchange 57.1, mxfp8_2d+on_gather+exchange 56.1
512 1 2 NVLink compiled H100: bf16 73.1, nvfp4+on_gather+exchange 66.9, fp8_block+on_gather+exchange 63.1
512 1 2 NVLink compiled H100: bf16 73.1, mxfp8+on_gather+exchange 67.7, fp8_current+on_gather+exchange 67.2
512 1 2 NVLink compiled H100: bf16 67.3, nvfp4+on_gather+exchange 62.9, fp8_block+on_gather+exchange 58.0
512 1 2 NVLink compiled H100: bf16 69.0, bf16+exchange 62.7
512 1 2 NVLink compiled H100: bf16 82.9, nvfp4+on_gather+exchange 71.1, fp8_block+on_gather+exchange 72.1
512 1 2 NVLink compiled H100: bf16 76.1, nvfp4+on_gather+exchange 67.7, cast nvfp4+on_gather+exchange 74.9
512 1 2 NVLink compiled H100: bf16 76.1, cast fp8_block+on_gather+exchange 66.9
512 1 2 NVLink compiled H100: bf16 72.7, nvfp4+on_gather+exchange 65.2, fp8_block+on_gather+exchange 65.5
512 1 2 NVLink compiled H100: bf16 72.7, cast nvfp4+on_gather+exchange 66.9
512 1 2 NVLink eager H100: bf16 65.7, nvfp4+on_gather+exchange 57.5, fp8_block+on_gather+exchange 56.1
512 1 2 NVLink eager H100: bf16 75.3, nvfp4+on_gather+exchange 68.0, fp8_block+on_gather+exchange 66.7
512 1 2 NVLink eager H100: bf16 75.3, mxfp8+on_gather+exchange 65.0, fp8_current+on_gather+exchange 69.0
512 1 2 NVLink eager H100: bf16 69.9, nvfp4+on_gather+exchange 61.1, fp8_block+on_gather+exchange 58.5
512 1 2 NVLink eager H100: bf16 69.9, cast nvfp4+on_gather+exchange 63.3
512 1 2 NVLink compiled H200: bf16 55.7, torchao 75.1, fp8_current+low 54.5*, nvfp4 58.2
512 1 2 NVLink eager H200: bf16 46.8, nvfp4 52.8
512 1 2 NVLink eager H200: bf16 55.3, fp8_current+low 63.4*, fp8_block+low 73.5, nvfp4 61.3, torchao 158.4*
512 1 2 NVLink eager H200: bf16 59.5, cast nvfp4 57.5, cast fp8_block 59.9
512 1 2 NVLink eager H200: bf16 63.9, fp8_current+low 78.4*, fp8_block+low 82.9, nvfp4 64.3
512 1 2 NVLink eager H200: bf16 59.7, cast nvfp4 65.0, cast fp8_block 70.6, cast fp8_current+low 80.3
512 1 2 NVLink compiled H200: bf16 54.6, fp8_current+low 57.5, nvfp4+on_gather+exchange 44.5
512 1 2 NVLink eager H200: bf16 56.2, fp8_current+low 72.7, fp8_block+low 77.9, nvfp4 58.6
512 1 2 NVLink eager H200: bf16 51.4, fp8_current+low 62.4, fp8_block+low 68.5
512 1 2 NVLink eager H200: bf16 46.4, fp8_rowwise+low 63.6, fp8_current+low 60.4
512 1 2 NVLink eager H200: bf16 51.3, fp8_current+low 59.4, fp8_block_1d 49.9
512 1 2 NVLink compiled H200: bf16 61.2, fp8_current+low 70.5*, fp8_block+low 71.5, cast nvfp4 66.6
512 1 2 NVLink compiled H200: bf16 61.2, cast fp8_block 63.1
512 1 2 NVLink compiled H200: bf16 52.8, fp8_current+low 54.3, fp8_rowwise+low 55.8, nvfp4 49.4*, fp8_block 53.7*
512 1 2 NVLink eager H200: bf16 60.9, fp8_current+low 69.3, fp8_rowwise+low 75.8, nvfp4 62.6*, fp8_block 60.0*
512 1 1 NVLink eager H200: bf16 51.3, nvfp4 63.0, cast nvfp4 76.5
512 1 1 NVLink eager H200: bf16 50.5, fp8_block 64.0
512 1 1 NVLink eager H200: bf16 52.2, fp8_current+low 81.1, fp8_block+low 73.1
512 1 1 NVLink compiled H200: bf16 60.3, nvfp4 72.2, cast nvfp4 83.5
512 1 1 NVLink compiled H200: bf16 83.4, fp8_block 98.4, fp8_current+low 101.0
"""
# The same on hosts so fast that bf16's step is the card's, and says nothing of the host: compared with nothing.
CARD_DECIDES = """
512 1 2 NVLink eager H200: bf16 44.8, fp8_current+low 52.8, nvfp4 47.8
512 1 2 NVLink eager H200: bf16 43.2, fp8_current+low 49.5, nvfp4 45.8
512 1 2 NVLink compiled H200: bf16 43.4, fp8_current+low 45.7
512 1 2 NVLink compiled H200: bf16 45.5, fp8_rowwise+low 57.7, fp8_current+low 47.9
"""
# Steps that follow one another, as many as the line says, beside bf16's in the same process; nothing is fitted to them.
# Those of sequence 4096 the card decides, so that bf16's says nothing of the host and is compared as well. Those beside
# bf16 of 54.6 and 56.3 ms are of before functions of linear layers were applied in less of the host, those beside 57.0
# and 54.4 of before plain parameters were sent with planes, those beside 55.0 and 54.5 of before they arrived
# with planes, those beside 50.3 and 46.8 of before launches took less of the host. Of the others at sequence 512,
# gradients were copied by scalar loads beside 61.5 and 50.6, their addresses stood in a table in the rest, and beside
# 49.0 FSDP2 reduced them.
TOGETHER = """
4096 1 2 NVLink compiled H200 5: bf16 108.1, torchao 90.5, fp8_current+low 76.9, fp8_rowwise+low 86.9
512 1 2 NVLink eager H200 10: bf16 49.0, fp8_current+low 57.8
512 1 2 NVLink eager H200 10: bf16 60.8, fp8_current+low 71.6
512 1 2 NVLink compiled H200 10: bf16 61.3, fp8_current+low 64.3, fp8_rowwise+low 73.8
512 1 2 NVLink eager H200 10: bf16 61.5, fp8_current+low 69.4, nvfp4 60.9
512 1 2 NVLink compiled H200 10: bf16 50.6, fp8_current+low 56.7, fp8_rowwise+low 61.6, nvfp4 46.7
512 1 2 NVLink eager H200 10: bf16 50.3, fp8_current+low 55.3, nvfp4 47.6
512 1 2 NVLink compiled H200 10: bf16 46.8, fp8_current+low 45.5, fp8_rowwise+low 50.8, nvfp4 42.7
512 1 2 NVLink eager H200 10: bf16 57.0, fp8_current+low 62.6, fp8_rowwise+low 60.7, nvfp4 52.0, mxfp8 50.5
512 1 2 NVLink compiled H200 10: bf16 54.4, fp8_current+low 52.3, fp8_rowwise+low 61.7, nvfp4 48.1, mxfp8 49.0
512 1 2 NVLink eager H200 10: bf16 55.0, fp8_current+low 61.6, fp8_rowwise+low 65.6, nvfp4 53.5
512 1 2 NVLink compiled H200 10: bf16 54.5, fp8_current+low 56.1, fp8_rowwise+low 58.7, nvfp4 48.1
512 1 2 NVLink eager H200 10: bf16 54.6, fp8_current 48.2, fp8_rowwise 49.7, fp8_block 50.4, fp8_delayed 52.1
512 1 2 NVLink compiled H200 10: bf16 56.3, fp8_current 46.7, fp8_rowwise 49.9, fp8_block 51.0, fp8_delayed 50.9
512 1 2 NVLink eager H200 10: bf16 61.5, fp8_block_1d 56.8, fp8_block_e8m0 57.8, fp8_e5m2_current 54.6, mxfp8_2d 53.8
512 1 2 NVLink compiled H200 10: bf16 60.0, fp8_block_1d 52.6, fp8_block_e8m0 54.8, fp8_e5m2_current 52.6
512 1 2 NVLink compiled H200 10: bf16 60.0, mxfp8_2d 54.1
512 1 2 NVLink eager H200 10: bf16 63.4, int8_block 57.4, int8_rowwise 56.2, int4_group32 59.1, mxfp4 55.3, mxint8 58.8
512 1 2 NVLink eager H200 10: bf16 63.4, nf4 60.6
512 1 2 NVLink compiled H200 10: bf16 55.1, int8_block 46.0, int8_rowwise 53.8, int4_group32 50.5, mxfp4 51.8
512 1 2 NVLink compiled H200 10: bf16 55.1, mxint8 50.4, nf4 47.4
512 1 2 NVLink eager H200 10: bf16 60.1, mxfp6_e2m3 55.3, mxfp6_e3m2 53.7, nvfp4_1d 52.9, nvfp4_4over6 55.4
512 1 2 NVLink eager H200 10: bf16 60.1, e3m4_block 53.0, mxfp8 57.4
512 1 2 NVLink compiled H200 10: bf16 57.3, mxfp6_e2m3 54.8, mxfp6_e3m2 55.8, nvfp4_1d 54.1, nvfp4_4over6 56.1
512 1 2 NVLink compiled H200 10: bf16 57.3, e3m4_block 51.3, mxfp8 51.2
512 1 2 NVLink eager H200 10: bf16 58.4, hybrid_fp8 54.8
512 1 2 NVLink eager H200 10: bf16 51.3, nvfp4 51.2, nvfp4+on_gather 39.7, fp8_block 46.8, fp8_block+on_gather 40.3
512 1 2 NVLink eager H200 10: bf16 51.3, fp8_current 46.2, fp8_current+on_gather 38.4
512 1 2 NVLink compiled H200 10: bf16 57.1, nvfp4 52.7, nvfp4+on_gather 42.6, fp8_block 51.4, fp8_block+on_gather 40.3
512 1 2 NVLink compiled H200 10: bf16 57.1, fp8_current 47.1, fp8_current+on_gather 39.2
512 1 2 NVLink eager H200 10: bf16 58.5, fp8_channel_bf16 54.5, hybrid_fp8 55.4
512 1 2 NVLink compiled H200 10: bf16 59.4, fp8_channel_bf16 53.0, hybrid_fp8 55.5
512 1 2 NVLink eager H200 10: bf16 60.4, nvfp4+on_gather 47.1, nvfp4 58.9, mxfp8_2d+on_gather 44.0
512 1 2 NVLink eager H200 10: bf16 60.4, fp8_delayed+on_gather 46.9, cast nvfp4+on_gather 51.2
512 1 2 NVLink eager H200 10: bf16 60.4, cast fp8_block+on_gather 46.5
512 1 2 NVLink eager H200 10: bf16 51.9, fp8_block_e8m0+on_gather 41.8, fp8_e5m2_current+on_gather 40.4
512 1 2 NVLink eager H200 10: bf16 51.9, e3m4_block+on_gather 40.0, nvfp4_4over6+on_gather 46.7
512 1 2 NVLink eager H200 10: bf16 51.9, int8_block+on_gather 40.1
512 1 2 NVLink eager H200 10: bf16 51.9, fp8_block+on_gather 39.6
512 1 2 NVLink compiled H200 10: bf16 60.1, nvfp4+on_gather 43.1, nvfp4 51.8, mxfp8_2d+on_gather 39.3
512 1 2 NVLink compiled H200 10: bf16 60.1, fp8_delayed+on_gather 44.3, cast nvfp4+on_gather 47.3
512 1 2 NVLink compiled H200 10: bf16 60.1, cast fp8_block+on_gather 42.3
512 1 2 NVLink compiled H200 10: bf16 46.7, fp8_block_e8m0+on_gather 36.1, fp8_e5m2_current+on_gather 37.6
512 1 2 NVLink compiled H200 10: bf16 46.7, e3m4_block+on_gather 36.2, nvfp4_4over6+on_gather 46.2
512 1 2 NVLink compiled H200 10: bf16 46.7, int8_block+on_gather 36.5
512 1 2 NVLink compiled H200 10: bf16 46.7, fp8_block+on_gather 35.9
512 1 2 NVLink eager H200 10: bf16 58.7, nf4+on_gather 43.5, fp8_current+on_gather 44.3, nvfp4+on_gather 44.3
512 1 2 NVLink eager H200 10: bf16 58.7, cast fp8_current+on_gather 47.0, fp8_current+low 66.9
512 1 2 NVLink compiled H200 10: bf16 78.3, nf4+on_gather 42.7, fp8_current+on_gather 42.8, nvfp4+on_gather 43.5
512 1 2 NVLink compiled H200 10: bf16 78.3, cast fp8_current+on_gather 47.3, fp8_current+low 56.4
512 1 2 NVLink eager H100 10: bf16 56.2, fp8_current+low 63.5, fp8_rowwise+low 68.5, nvfp4 55.5
512 1 2 NVLink compiled H100 10: bf16 52.5, fp8_current+low 58.2, fp8_rowwise+low 66.3, nvfp4 49.5
512 1 2 NVLink compiled H100 10: bf16 52.5, nvfp4+on_gather+exchange 43.8
"""
