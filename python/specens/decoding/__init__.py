"""The loop that every schedule runs in: requests, their logits, tests of drafts. Knows no model library."""
