#!/bin/bash
# Made up: a Trainer of Hugging Face on two nodes of eight A100, as torchrun starts it on each of them.
torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint $HEAD:29500 \
  run_clm.py --config_name config.json --dataset_name wikitext --block_size 4096 \
  --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --bf16 --gradient_checkpointing --fsdp "full_shard auto_wrap" \
  --learning_rate 2e-5 --max_steps 1000 --output_dir out
