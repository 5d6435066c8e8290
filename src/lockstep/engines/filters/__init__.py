"""The distribution that a request samples from: penalties, bias, grammars, top-k, top-p, min-p."""
