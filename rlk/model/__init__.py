"""The one Qwen3 dense definition that every engine runs, and its weights in and out."""
