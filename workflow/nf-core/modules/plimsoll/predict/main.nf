process PLIMSOLL_PREDICT {
    tag "${meta.id}"
    label 'process_medium'

    conda "${moduleDir}/environment.yml"
    // Build this image with packaging/Containerfile: none is published yet.
    container "plimsoll:0.1.0"

    input:
    tuple val(meta), path(sequences)
    path weights

    output:
    tuple val(meta), path("*/predictions.tsv")                         , emit: predictions
    tuple val(meta), path("*/windows.tsv")                             , emit: windows
    tuple val(meta), path("*/{windows,regions}.bed")                   , emit: bed
    tuple val(meta), path("*/{regions.tsv,regions.fna,viruses.tsv}")   , emit: regions     , optional: true
    tuple val(meta), path("*/notes.tsv")                               , emit: notes
    tuple val(meta), path("*/run.json")                                , emit: run_record
    tuple val(meta), path("*/plimsoll*_mqc.tsv")                       , emit: multiqc
    tuple val(meta), path("*/virus.{fna,fastq}*")                        , emit: virus       , optional: true
    tuple val(meta), path("*/prediction_results*")                     , emit: virnucpro   , optional: true
    tuple val(meta), path("*/embeddings.*")                            , emit: embeddings  , optional: true
    tuple val(meta), path("*/{chunked.fa,nucleotide.fa,protein.faa}")  , emit: intermediate, optional: true
    tuple val("${task.process}"), val('plimsoll'), eval("plimsoll --version | sed 's/plimsoll //'"), topic: versions, emit: versions_plimsoll

    when:
    task.ext.when == null || task.ext.when

    script:
    def args = task.ext.args ?: ''
    def prefix = task.ext.prefix ?: "${meta.id}"
    def models = weights ? "--weights ${weights}" : ''
    // 80 % of the job's memory; the rest is reserve.
    def memory = task.memory ? "--memory-budget ${task.memory.toMega().intdiv(5) * 4}MB" : ''
    """
    plimsoll predict \\
        ${sequences} \\
        ${models} \\
        ${args} \\
        ${memory} \\
        --threads ${task.cpus} \\
        --no-progress \\
        --output-dir ${prefix}
    """

    stub:
    def args = task.ext.args ?: ''
    def prefix = task.ext.prefix ?: "${meta.id}"
    """
    echo ${args}
    mkdir ${prefix}
    touch ${prefix}/predictions.tsv
    touch ${prefix}/windows.tsv
    touch ${prefix}/windows.bed
    touch ${prefix}/notes.tsv
    touch ${prefix}/run.json
    touch ${prefix}/plimsoll_mqc.tsv
    touch ${prefix}/plimsoll_calls_mqc.tsv
    touch ${prefix}/virus.fna
    touch ${prefix}/prediction_results.txt
    touch ${prefix}/prediction_results_highestscore.csv
    """
}
