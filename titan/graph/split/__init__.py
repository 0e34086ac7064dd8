from titan.moved import old_names

__getattr__ = old_names(__name__)
