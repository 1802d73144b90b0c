"""Models that draft: a small model of the same vocabulary, MTP layers, EAGLE-3 heads. `seam` says what each can do."""
