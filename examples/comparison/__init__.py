"""The ablation: recipes and backward modes beside each other on the main job, same seeds and data, and one report."""
