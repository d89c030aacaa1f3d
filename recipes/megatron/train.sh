#!/bin/bash
# A training with Megatron-LM, made up for the pages of farpipe: a 70B model on 16 machines of eight H100.
#
#     farpipe import recipes/megatron/train.sh --site h100 -o job.toml

GPUS_PER_NODE=8
NNODES=16

torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $SLURM_NODEID \
    --master_addr $MASTER_ADDR --master_port 6000 pretrain_gpt.py \
    --tensor-model-parallel-size 8 \
    --pipeline-model-parallel-size 4 \
    --sequence-parallel \
    --use-distributed-optimizer \
    --num-layers 80 \
    --hidden-size 8192 \
    --ffn-hidden-size 28672 \
    --num-attention-heads 64 \
    --group-query-attention \
    --num-query-groups 8 \
    --swiglu \
    --normalization RMSNorm \
    --position-embedding-type rope \
    --disable-bias-linear \
    --untie-embeddings-and-output-weights \
    --attention-dropout 0 \
    --hidden-dropout 0 \
    --seq-length 4096 \
    --max-position-embeddings 4096 \
    --micro-batch-size 1 \
    --global-batch-size 512 \
    --train-iters 2000 \
    --lr 1.5e-4 \
    --bf16 \
    --use-flash-attn \
    --vocab-size 128000 \
    --tokenizer-type NullTokenizer \
    --data-path data/text_document \
    --log-interval 1 \
    --log-throughput
