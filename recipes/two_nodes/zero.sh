#!/bin/bash
# Made up: a Trainer of Hugging Face on two nodes of eight A100, as DeepSpeed starts it.
deepspeed --num_nodes 2 --num_gpus 8 --hostfile hosts \
  run_clm.py --config_name config.json --dataset_name wikitext --block_size 4096 \
  --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --bf16 --gradient_checkpointing --deepspeed ds.json \
  --learning_rate 2e-5 --max_steps 1000 --output_dir out
