from titan.moved import install

install()
