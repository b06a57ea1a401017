import sys, torch, re, time
from collections import Counter
from transformers import AutoModelForCausalLM, AutoTokenizer
from multirole.engines.transformers_engine import TransformersEngine
from tiny_base2.skills import *
torch.set_num_threads(1)
f=sys.argv[1]; n=int(sys.argv[2])
tok=AutoTokenizer.from_pretrained(f); m=AutoModelForCausalLM.from_pretrained(f,dtype=torch.float32)
e=TransformersEngine(eos_id=tok.eos_token_id,max_length=512); e.publish(m,version=0)
x=Examiner(e,tok,n)
c=Counter()
asks=[asked(EvalOpt(),p,{("generator",0,0):str(d)},("evaluator",0,0)) for p,d in zip(x.problems,x.samples[0])]
ex=[]
for p,d,r in zip(x.problems,x.samples[0],x.ask(asks,x.marks)):
    claim=habits.boxed(str(d)); v=habits.last_value(r); mm=re.search(r"Solution 1 (\d+)( ok| is wrong)",r)
    if claim is None: c["nobox said"]+= "No box" in r; c["nobox"]+=1; continue
    c["box"]+=1
    if not mm: c["unparsed"]+=1; ex.append(repr(str(r))[-80:]); continue
    c["copy right"]+= int(mm[1])==claim
    same=int(mm[1])==v
    c["same" if same else "differ"]+=1
    c["same ok" if same else "differ wrong"]+= (mm[2]==" ok") == same
    c["box follows word"]+= ("{Correct}" in r)==(mm[2]==" ok")
print("evaluator",dict(c)); print(ex[:5])
places=[i for i,r in enumerate(zip(*x.right)) if 0<sum(r)<3]
asks=[asked(Voting(),x.problems[i],{("generator",s,0):str(x.samples[s][i]) for s in range(3)},("aggregator",0,0)) for i in places]
c=Counter(); ex=[]
for i,r in zip(places,x.ask(asks,[x.marks[i] for i in places])):
    claims=[habits.boxed(str(x.samples[s][i])) for s in range(3)]; v=habits.last_value(r)
    found=re.findall(r"Solution (\d) (?:(\d+)( ok| is wrong)|No box)",r)
    c["n"]+=1; c["none"]+= not found
    for k,num,w in found:
        if not num: c["saidnobox"]+=1; c["saidnobox right"]+= claims[int(k)-1] is None; continue
        c["said %s"%k]+=1; c["copy %s"%k]+= claims[int(k)-1]==int(num) if int(k)<=3 else 0
        same=int(num)==v; c["same" if same else "differ"]+=1; c["same ok" if same else "differ wrong"]+= (w==" ok")==same
    if len(ex)<4: ex.append((x.problems[i].question,claims,str(r)))
print("aggregator",dict(c)); 
for t in ex: print(t)
cases=[]
for p,t,r in zip(x.problems,x.samples[0],x.right[0]):
    line=None if r else point_out(p,Draft(str(t),False))
    if line: cases.append((p,str(t),line))
asks=[asked(EvalOpt(),p,{("generator",0,0):t,("evaluator",0,0):l.text},("generator",0,1)) for p,t,l in cases]
c=Counter()
for (p,t,l),r in zip(cases,x.ask(asks)):
    c["n"]+=1; first=r.split("\n")[0]; want=l.line
    c["mark ok"]+= first[:1]==want[:1]; c["copied"]+= first==want; c["right"]+= habits.boxed(r)==p.reference
    c["boxonly"]+= r.startswith("\\boxed")
    c["number copied"]+= re.findall(r"\d+",first)[:1]==re.findall(r"\d+",want)[:1]
    if c["n"]<8: print(p.question,"|",repr(t)[:120],"|",repr(l.text),"->",repr(str(r))[:150])
print("refiner",dict(c))
