"""Parts that several methods share: components and the loops inside them; no builders."""
