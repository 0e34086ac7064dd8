"""Language-model head and token cross-entropy in one op that never holds the full logits."""
