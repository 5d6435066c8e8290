"""The rules and kept ids of sampling filters, applied to the policy's logits."""
