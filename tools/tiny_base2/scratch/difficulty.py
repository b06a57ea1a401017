import sys, json, random, torch
from itertools import islice
import multirole.tasks.tiny_chain as T
from transformers import AutoModelForCausalLM, AutoTokenizer
from multirole.engines.transformers_engine import TransformersEngine
from tiny_base2.ask import complete
from multirole.core.types import user
from multirole.workflows.prompts import render
torch.set_num_threads(1)
f=sys.argv[1]; tok=AutoTokenizer.from_pretrained(f); m=AutoModelForCausalLM.from_pretrained(f,dtype=torch.float32)
e=TransformersEngine(eos_id=tok.eos_token_id,max_length=1024); e.publish(m,version=0)
for L in json.loads(sys.argv[2]):
    ps=list(islice(T.stream("validation",random.Random(5),{"long":tuple(L[0]),"wide":tuple(L[1])}),200))
    asks=[[user(render(p.task,"generator",question=p.question))] for p in ps]
    out={}
    for mark,name in (("","any"),(">","split"),("=","direct")):
        rs=complete(e,tok,asks,mark,300); r=[x.is_correct for x in T.TinyChain().score(ps,list(rs))]
        for k in ("long","wide"):
            v=[a for a,p in zip(r,ps) if T.kind_of(p.question)==k]; out[name+" "+k]=round(sum(v)/len(v),3)
        out[name]=round(sum(r)/len(r),3)
    print(L,out,flush=True)
