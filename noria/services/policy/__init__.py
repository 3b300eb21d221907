"""The policy server: several versions of the model behind one OpenAI-compatible endpoint."""
